"""Planted defects and the default gates of docs/gates.md: at INT8 the absolute gates catch them, at 4 bit the account of tensors
does, whatever the divergence says."""
import json
import os
import struct

from e2e import BUILD_ROOT, DEMO, SOURCE_ROOT, check, copy_model, load, main, run, same, succeeds, tensor_places
from planted import Packed, layer

PROGRAMS = os.path.join(BUILD_ROOT, "src", "cli")
TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text")
DOCS = os.path.join(SOURCE_ROOT, "docs")
MEASURE = ["--text", f"{TEXT}/austen-heldout.txt", "--windows", 4, "--length", 256]
CALIB = ["--calib", f"{TEXT}/austen-calib.txt", "--calib-windows", 4, "--calib-length", 256]
GPTQ = ["--method", "gptq", *CALIB]


def program(name):
    return os.path.join(PROGRAMS, name)


def convert(name, *options, model=DEMO):
    succeeds(model, "-q", *MEASURE, "-o", f"{name}.qpk", "--report", f"{name}.json", *options)


def judge(name, good, gates, *options):
    """Report of a damaged file: measured and read back afresh, judged by default gates. Names of the gates that fail."""
    r = run(f"{name}.qpk", "-q", "--reference", DEMO, *MEASURE, "--json", program=program("qeval"))
    same(r.returncode, 0, f"qeval {name} ({r.stderr})")
    report = load(f"{good}.json")
    report["evaluation"] = json.loads(r.stdout)
    r = run("account", f"{name}.qpk", "-q", "--model", DEMO, "--report", f"{good}.json", "--json", program=program("qinspect"))
    account = json.loads(r.stdout)
    same(r.returncode, 1 if account["tensors_off"] else 0, f"qinspect account {name}")
    report["artifacts"][0]["account_error"] = account["account_error"]
    with open(f"{name}-judged.json", "w", encoding="utf-8") as f:
        json.dump(report, f)
    r = run("gate", f"{name}-judged.json", "--gates", f"{DOCS}/{gates}", *options, "--format", "json", program=program("qreport"))
    verdict = json.loads(r.stdout)
    failed = [g["name"] for g in verdict["gates"] if not g["pass"]]
    same(r.returncode, 1 if failed else 0, f"exit code of the gates of {name} ({r.stderr})")
    print(f"     {name}: kld {report['evaluation']['kld_mean']:.6f}, account {account['account_error']:.3g}, "
          f"{account['tensors_off']} tensors off, failed {failed}")
    return failed, account


def transposed_head(folder):
    """Copy of the demo model in which one head of a value projection is transposed."""
    config = load(f"{DEMO}/config.json")
    n, width = config["head_dim"], config["hidden_size"]
    copy_model(DEMO, folder)
    name = "model.layers.2.self_attn.v_proj.weight"
    at = tensor_places(f"{folder}/model.safetensors")[name]
    with open(f"{folder}/model.safetensors", "r+b") as f:
        f.seek(at)
        rows = [list(struct.unpack(f"<{width}H", f.read(2 * width))) for _ in range(n)]
        block = [[rows[c][r] for c in range(n)] for r in range(n)]
        f.seek(at)
        for row, new in zip(rows, block):
            f.write(struct.pack(f"<{width}H", *(new + row[n:])))
    return folder


def plant(good, name, change):
    packed = Packed(f"{good}.qpk")
    change(packed)
    packed.write(f"{name}.qpk")


def scale_layer(packed, factor=1.03, number=3):
    for name in layer(packed.records, number):
        packed.multiply_scales(name, factor)


def take_layers(packed, other):
    for number in (2, 3):
        for name in layer(packed.records, number):
            packed.take(name, other)


def case_int8():
    convert("good", "--bits", 8, "--group", 128, "--asymmetric", *GPTQ)
    convert("rtn", "--bits", 8, "--group", 128, "--asymmetric")
    same(judge("good", "good", "gates-int8.yaml")[0], [], "failed gates of a good file")
    convert("head", "--bits", 8, "--group", 128, "--asymmetric", *GPTQ, model=transposed_head("other"))
    check("kld_mean" in judge("head", "good", "gates-int8.yaml")[0], "transposed head not seen by the divergence")
    plant("good", "zero", lambda p: p.shift_zeros("model.layers.1.mlp.down_proj.weight", 1))
    failed, account = judge("zero", "good", "gates-int8.yaml")
    check("account_error" in failed, f"zero points: {failed}")
    same([t["name"] for t in account["tensors"] if not t["same"]], ["model.layers.1.mlp.down_proj.weight"], "tensor to blame")
    plant("good", "scales", scale_layer)
    failed, account = judge("scales", "good", "gates-int8.yaml")
    check("account_error" in failed, f"scales: {failed}")
    same(sorted(t["name"] for t in account["tensors"] if not t["same"]), sorted(layer(Packed("good.qpk").records, 3)), "to blame")
    plant("good", "mixed", lambda p: take_layers(p, Packed("rtn.qpk")))
    failed, account = judge("mixed", "good", "gates-int8.yaml")
    check("account_error" in failed and account["tensors_off"] == 14, f"RTN in two layers: {failed}, {account['tensors_off']}")


def case_4_bit():
    convert("good", "--group", 128, *GPTQ)
    convert("rtn", "--group", 128)
    baseline = ["--baseline", "good.json"]
    same(judge("good", "good", "gates-int4.yaml", *baseline)[0], [], "failed gates of a good file")
    plant("good", "scales", scale_layer)
    failed, account = judge("scales", "good", "gates-int4.yaml", *baseline)
    check("account_error" in failed and account["tensors_off"] == 7, f"scales: {failed}, {account['tensors_off']}")
    plant("good", "one", lambda p: p.multiply_scales("model.layers.3.self_attn.o_proj.weight", 1.03))
    failed, account = judge("one", "good", "gates-int4.yaml", *baseline)
    check("account_error" in failed and account["tensors_off"] == 1, f"scales of one matrix: {failed}")
    plant("good", "mixed", lambda p: take_layers(p, Packed("rtn.qpk")))
    failed, account = judge("mixed", "good", "gates-int4.yaml", *baseline)
    check("account_error" in failed and account["tensors_off"] == 14, f"RTN in two layers: {failed}, {account['tensors_off']}")


def case_4_bit_by_the_quantizer_itself():
    """Layers that the quantizer rounded to nearest, honestly accounted for: the gain of calibration is gone there."""
    convert("good", "--group", 128, *GPTQ)
    convert("damped", "--group", 128, *GPTQ, "--set", "quantize.gptq.damp=1", "--set", "quantize.gptq.sweeps=0",
            "--set", "quantize.gptq.refit=false")
    r = run("gate", "damped.json", "--gates", f"{DOCS}/gates-int4.yaml", "--baseline", "good.json", "--format", "json",
            program=program("qreport"))
    failed = [g["name"] for g in json.loads(r.stdout)["gates"] if not g["pass"]]
    check(r.returncode == 1 and "tensor_gain" in failed, f"failed gates: {failed}")


main(globals())
