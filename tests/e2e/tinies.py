"""The tiny models of all families: their tensors, golden values, and what a quantization of them comes to."""
import json
import os
import random
import struct

from e2e import BUILD_ROOT, MODELS, load, run, same, succeeds

QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
TINIES = os.path.join(MODELS, "tiny")
METHODS = {"rtn": (), "gptq": (), "awq": (), "awq+gptq": (), "smoothquant": ("--set", "quantize.activations.bits=8"),
           "smoothquant+gptq": ("--set", "quantize.activations.bits=8")}


def tiny(name):
    return os.path.join(TINIES, name)


def read_tensors(folder, prefix="model"):
    """name -> (dtype, shape, bytes) of all safetensors files of a model folder whose names begin so."""
    tensors = {}
    for file in sorted(os.listdir(folder)):
        if file.startswith(prefix) and file.endswith(".safetensors"):
            with open(os.path.join(folder, file), "rb") as f:
                data = f.read()
            start = 8 + struct.unpack("<Q", data[:8])[0]
            for name, x in json.loads(data[8:start]).items():
                if name != "__metadata__":
                    begin, end = x["data_offsets"]
                    tensors[name] = (x["dtype"], x["shape"], data[start + begin:start + end])
    return tensors


def write_tensors(path, tensors):
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + body)


def write_ids(model, path="ids.npy", n=1024):
    """Token ids as calibration text: not all tiny models have a tokenizer."""
    vocab = load(os.path.join(model, "config.json"))["vocab_size"]
    rng = random.Random(3)
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({n},), }}"
    header += " " * (-(11 + len(header)) % 64) + "\n"
    with open(path, "wb") as f:
        f.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
        f.write(struct.pack(f"<{n}i", *(rng.randrange(vocab) for _ in range(n))))
    return path


def nll(model, name):
    """Summed NLL of the golden ids of a tiny model."""
    with open("golden.json", "w", encoding="utf-8") as f:
        json.dump(load(os.path.join(tiny(name), "golden.json"))["input_ids"], f)
    r = run(model, "--ids", "golden.json", "--json", program=QEVAL)
    same(r.returncode, 0, f"exit code of qeval ({r.stderr})")
    return [x["nll_sum"] for x in json.loads(r.stdout)["sequences"]]


def quantize(model, out, method, *flags, bits="8"):
    calib = () if method == "rtn" else ("--calib", write_ids(model), "--calib-windows", "8", "--calib-length", "64",
                                        "--set", "calibration.perplexity_limit=1e9")
    succeeds(model, "-o", out, "--bits", bits, "-g", "16", "--method", method, *calib, "--no-verify", "--report", "r.json", "--force",
             *METHODS[method], *flags)
    return load("r.json")
