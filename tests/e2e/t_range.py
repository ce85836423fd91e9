"""Plans of models that no test could hold: the published shapes of the Qwen3 family as checkpoints whose weights are holes in
a file. Sizes against the published numbers of parameters and against runs of small models."""
import gzip
import json
import math
import os
import shutil
import struct

from e2e import DEMO, SOURCE_ROOT, check, load, main, run, same, succeeds

TOKENIZER = os.path.join(SOURCE_ROOT, "tests", "data", "tokenizers", "qwen3", "tokenizer.json.gz")
TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
VOCAB, HEAD_DIM = 151936, 128
# parameters in millions, hidden, layers, heads, kv heads, ffn, tied
DENSE = {"0.6B": (596, 1024, 28, 16, 8, 3072, True), "1.7B": (1720, 2048, 28, 16, 8, 6144, True), "4B": (4020, 2560, 36, 32, 8, 9728, True),
         "8B": (8190, 4096, 36, 32, 8, 12288, False), "14B": (14800, 5120, 40, 40, 8, 17408, False), "32B": (32800, 5120, 64, 64, 8, 25600, False)}
# the same, and experts, width of one
SPARSE = {"30B-A3B": (30500, 2048, 48, 32, 4, 6144, False, 128, 768), "235B-A22B": (235000, 4096, 94, 64, 4, 12288, False, 128, 1536)}


def shapes(hidden, layers, heads, kv_heads, ffn, tied, experts=0, expert_ffn=0):
    q, kv = heads * HEAD_DIM, kv_heads * HEAD_DIM
    block = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_norm": [HEAD_DIM], "self_attn.k_norm": [HEAD_DIM],
             "self_attn.q_proj": [q, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden], "self_attn.o_proj": [hidden, q]}
    for where, width in [(f"mlp.experts.{e}", expert_ffn) for e in range(experts)] or [("mlp", ffn)]:
        block.update({f"{where}.gate_proj": [width, hidden], f"{where}.up_proj": [width, hidden], f"{where}.down_proj": [hidden, width]})
    if experts:
        block["mlp.gate"] = [experts, hidden]
    result = {"model.embed_tokens.weight": [VOCAB, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        result.update({f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()})
    return result if tied else {**result, "lm_head.weight": [VOCAB, hidden]}


def make(folder, hidden, layers, heads, kv_heads, ffn, tied, experts=0, expert_ffn=0):
    """A checkpoint with an honest header and nothing behind it. Returns name -> shape."""
    os.mkdir(folder)
    tensors = shapes(hidden, layers, heads, kv_heads, ffn, tied, experts, expert_ffn)
    header, end = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * math.prod(shape)]}
        end += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    with open(f"{folder}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)
    with gzip.open(TOKENIZER) as packed, open(f"{folder}/tokenizer.json", "wb") as f:
        shutil.copyfileobj(packed, f)
    config = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM,
              "intermediate_size": ffn, "vocab_size": VOCAB, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
              "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "bos_token_id": 151643,
              "eos_token_id": 151645, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": layers,
              "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    if experts:
        config.update(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=experts, num_experts_per_tok=8, norm_topk_prob=True,
                      moe_intermediate_size=expert_ffn, decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False, router_aux_loss_coef=0.001)
    with open(f"{folder}/config.json", "w", encoding="utf-8") as f:
        json.dump(config, f)
    return tensors


def plan_of(model, *flags):
    """Plan as JSON; a disk that is too small for it may be the end of it (5), but the plan is there."""
    r = run(model, "-o", "a.qpk", "--bits", "4", "-g", "128", *flags, "-n", "--json")
    check(r.returncode == 0 or (r.returncode == 5 and "needed on disk" in r.stderr), f"exit code {r.returncode}: {r.stderr}")
    return json.loads(r.stdout)


def check_plan(name, tensors, millions, plan):
    step = plan["steps"][0]
    elems = sum(math.prod(s) for s in tensors.values())
    check(abs(elems / 1e6 / millions - 1) < 0.004, f"{name}: {elems} parameters, published {millions} million")
    same(step["bytes_in"], 2 * elems, f"{name}: bytes of the checkpoint")
    # 4 bits and an F16 scale for 128 weights; table and head 8 bits, a scale per row; norms as they are
    matrices = {n: s for n, s in tensors.items() if len(s) == 2 and "mlp.gate." not in n}
    table = sum(math.prod(s) for n, s in matrices.items() if "layers" not in n)
    body = sum(math.prod(s) for n, s in matrices.items() if "layers" in n)
    least = body * (4 + 16 / 128) / 8 + table
    check(least <= step["file_bytes"] < 1.02 * least + 20e6, f"{name}: file of {step['file_bytes']} bytes, expected about {least:.0f}")
    same(step["weights"], table + body, f"{name}: weights to quantize")
    seconds = plan["seconds"]
    check(all(seconds[k] > 0 for k in ("hash", "verify", "total")), f"{name}: times {seconds}")
    check(seconds["total"] >= seconds["calibrate"] + seconds["verify"], f"{name}: times {seconds}")
    return plan["peak_rss_bytes"], step["file_bytes"], seconds["calibrate_layer"]


def case_dense():
    last = (0, 0, 0)
    for name, (millions, *shape) in DENSE.items():
        tensors = make(name, *shape)
        plan = plan_of(name, "--method", "gptq", "--calib", TEXT, "--calib-windows", "4", "--windows", "2")
        now = check_plan(name, tensors, millions, plan)
        check(all(b > a for a, b in zip(last[:2], now)), f"{name}: {now} after {last}")
        layer = sum(math.prod(s) for n, s in tensors.items() if "layers.0." in n)
        check(now[0] < 30 * layer + 2e9, f"{name}: {now[0]} bytes of memory, a layer has {layer} weights")
        check(plan["seconds"]["calibrate_layer"] * shape[1] <= plan["seconds"]["calibrate"], f"{name}: {plan['seconds']}")
        last = now


def case_experts():
    for name, (millions, *shape) in SPARSE.items():
        tensors = make(name, *shape)
        plan = plan_of(name, "--windows", "2")
        memory, _, _ = check_plan(name, tensors, millions, plan)
        layer = sum(math.prod(s) for n, s in tensors.items() if "layers.0." in n)
        check(memory < 6 * layer + 2e9, f"{name}: {memory} bytes of memory, a layer has {layer} weights")


def case_sizes_are_exact():
    """The file is as large as planned; only its manifest, which names sums of inputs, is not counted before they are known."""
    for flags in (("--bits", "4", "-g", "64"), ("--bits", "3", "-g", "32", "--asymmetric"), ("--bits", "8", "-g", "channel")):
        step = json.loads(succeeds(DEMO, "-o", "a.qpk", *flags, "--no-verify", "--force", "-n", "--json").stdout)["steps"][0]
        succeeds(DEMO, "-o", "a.qpk", *flags, "--no-verify", "--force", "--report", "r.json")
        stored = sum(t.get("bytes_out", 0) for t in load("r.json")["tensors"])
        same(step["bytes_out"], stored, "bytes of all tensors")
        check(0 <= os.path.getsize("a.qpk") - step["file_bytes"] < 4096, f"{os.path.getsize('a.qpk')} bytes, planned {step['file_bytes']}")


def case_text():
    make("m", 1024, 2, 16, 8, 3072, True)
    out = succeeds("m", "-o", "a.qpk", "--bits", "4", "-g", "128", "--method", "gptq", "--calib", TEXT, "--calib-windows", "2", "--windows", "2", "-n").stdout
    for words in ("write a.qpk (qpk, ", " bytes and a manifest)", "memory   about ", "disk     ", "time     about ", "for each layer of the calibration"):
        check(words in out, f"the plan lacks {words!r}: {out}")
    same(os.listdir("."), ["m"], "files after a plan")


main(globals())
