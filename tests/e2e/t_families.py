"""Every family from checkpoint to packed file and back: each tensor accounted once, what was written scored as the golden
values say, fused matrices and residual scales compared with models that say the same in other words."""
import json
import os
import random
import struct

from e2e import check, copy_model, load, main, same, sha256, succeeds
from tinies import METHODS, QEVAL, nll, quantize, read_tensors, tiny, write_tensors

FAMILIES = ("gemma2", "gemma3_text", "granite", "llama", "llama-bias", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3-untied", "seed_oss", "smollm3")


def case_every_family_and_method():
    for name in FAMILIES:
        stored = read_tensors(tiny(name))
        golden = load(os.path.join(tiny(name), "golden.json"))["nll_sum"]
        for method in METHODS:
            what = f"{name}, {method}"
            report = quantize(tiny(name), "a.qpk", method)
            same(sorted(t["name"] for t in report["tensors"]), sorted(stored), f"account of {what}")
            for t in report["tensors"]:
                matrix = len(stored[t["name"]][1]) == 2
                want = ("copied", "dropped") if not matrix else ("tied",) if name == "qwen3" and t["name"] == "lm_head.weight" else ("quantized",)
                check(t["action"] in want, f"{what}: {t}")
                if method != "rtn" and matrix and t["layer"] >= 0:
                    same(t["method"], "gptq" if "gptq" in method else "rtn", f"method of {t['name']}, {what}")
            check(not [e for e in report["events"] if e["level"] == "fallback"], f"events of {what}: {report['events']}")
            # 8 bits in groups of 16 move a sum over 47 targets by some tenths at most; a matrix in the wrong place by tens
            for got, true in zip(nll("a.qpk", name), golden):
                check(abs(got - true) < (2 if "smooth" in method else 1), f"{what}: nll {got}, of the model {true}")


def case_likeliest_ids():
    """`top1_sum` of id lists: the largest logit of the reference implementation is behind the last position and nowhere else."""
    for name in FAMILIES:
        golden = load(os.path.join(tiny(name), "golden.json"))
        dtype, (n_lists, length, vocab), data = read_tensors(tiny(name), "golden")["logits"]
        same(dtype, "F32", "logits")
        lists, want = [], []
        for s, ids in enumerate(golden["input_ids"]):
            rows = [struct.unpack_from(f"<{vocab}f", data, 4 * vocab * (s * length + t)) for t in range(length)]
            best = [row.index(max(row)) for row in rows]
            hits = sum(b == i for b, i in zip(best, ids[1:]))
            lists += [ids, ids + best[-1:], ids + [(best[-1] + 1) % vocab]]
            want += [hits, hits + 1, hits]
        with open("ids.json", "w", encoding="utf-8") as f:
            json.dump(lists, f)
        answer = json.loads(succeeds(tiny(name), "--ids", "ids.json", "--json", program=QEVAL).stdout)["sequences"]
        same([x["top1_sum"] for x in answer], want, name)


def case_verified_families():
    for name in ("gemma2", "gemma3_text", "qwen2"):  # those with a tokenizer
        succeeds(tiny(name), "-o", "a.qpk", "--bits", "8", "-g", "16", "--windows", "4", "--length", "64", "--report", "r.json", "--force")
        check(0 <= load("r.json")["evaluation"]["kld_mean"] < 2e-3, f"{name}: {load('r.json')['evaluation']}")


def case_threads():
    for name in ("phi3", "gemma2"):
        digests = set()
        for threads in ("1", "2", "7"):
            quantize(tiny(name), "a.qpk", "awq+gptq", "-t", threads, bits="4")
            digests.add(sha256("a.qpk"))
        same(len(digests), 1, f"files of {name} by number of threads")


def case_fused_as_in_parts():
    """phi3 is mistral with two fused matrices: the same numbers come out, down to the last bit of the NLL."""
    parts = {}
    for name, (dtype, shape, data) in read_tensors(tiny("phi3")).items():
        row = 2 * shape[-1]
        if name.endswith("qkv_proj.weight"):
            for part, begin, end in (("q", 0, 64), ("k", 64, 96), ("v", 96, 128)):
                parts[name.replace("qkv", part)] = (dtype, [end - begin, shape[1]], data[begin * row:end * row])
        elif name.endswith("gate_up_proj.weight"):
            for part, begin, end in (("gate", 0, 160), ("up", 160, 320)):
                parts[name.replace("gate_up", part)] = (dtype, [end - begin, shape[1]], data[begin * row:end * row])
        else:
            parts[name] = (dtype, shape, data)
    copy_model(tiny("phi3"), "m", model_type="mistral", architectures=["MistralForCausalLM"], original_max_position_embeddings=None)
    write_tensors("m/model.safetensors", parts)
    same(nll("m", "phi3"), nll(tiny("phi3"), "phi3"), "nll of the models")
    for method, bits in (("rtn", "4"), ("gptq", "4"), ("gptq", "3")):
        fused = quantize(tiny("phi3"), "a.qpk", method, bits=bits)
        quantize("m", "b.qpk", method, bits=bits)
        same(nll("b.qpk", "phi3"), nll("a.qpk", "phi3"), f"nll of the files, {method} of {bits} bits")
        rows = {t["name"].split(".")[-2]: t["rows"] for t in fused["tensors"] if t["layer"] == 0 and t["action"] == "quantized"}
        same(rows, {"qkv_proj": 128, "o_proj": 64, "gate_up_proj": 320, "down_proj": 64}, "rows of the account")


def case_residual_scale():
    """Half of granite's residual multiplier and twice its output matrices is the same model, and every step is exact."""
    def double(name, tensor):
        if not name.endswith(("o_proj.weight", "down_proj.weight")):
            return tensor
        bits = struct.unpack(f"<{len(tensor[2]) // 2}H", tensor[2])
        return tensor[0], tensor[1], struct.pack(f"<{len(bits)}H", *(b + 0x80 if b & 0x7f80 else b for b in bits))
    copy_model(tiny("granite"), "a", residual_multiplier=0.5)
    copy_model(tiny("granite"), "b", residual_multiplier=0.25)
    write_tensors("b/model.safetensors", {n: double(n, t) for n, t in read_tensors("b").items()})
    seen = []
    for method in ("rtn", "gptq", "awq+gptq"):
        for model in ("a", "b"):
            quantize(model, f"{model}.qpk", method, bits="4")
        same(nll("b.qpk", "granite"), nll("a.qpk", "granite"), f"nll by {method}")
        seen.append(nll("a.qpk", "granite"))
    check(len({str(x) for x in seen}) == 3, f"methods that give the same: {seen}")


main(globals())
