#!/usr/bin/env python3
"""Make tests/data/tokenizers/cases.jsonl.gz: small tokenizer.json files with texts and the ids and decoded texts that
the tokenizers library (0.23.3) gives for them. Hand-made ones for known trouble, then seeded random ones that mix
normalizers, pre-tokenizers, added tokens, model flags, post-processors and decoders.

usage: python3 scripts/make_tokenizer_vectors.py OUT.jsonl.gz [SEED [N]]      (needs: pip install tokenizers==0.23.3)
"""
import gzip
import json
import random
import sys

from tokenizers import Tokenizer


def byte_alphabet():
    plain = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    n = 0
    table = {}
    for b in range(256):
        table[b] = chr(b) if b in plain else chr(256 + n)
        n += b not in plain
    return table


BYTES = byte_alphabet()
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace("{1,3}", "")
DEEPSEEK = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
            " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+")
CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = [GPT2, LLAMA3, QWEN, DEEPSEEK, CASED, r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", r"\p{N}+",
            "a", r"\s", "^a|b$", "(?<=a)b", r"\p{Lu}?\p{Ll}+", r"\p{Han}+|.", r"\d+|\D", r"\p{M}+", "(?:ab)++",
            r"[\p{P}\p{S}]", r"\P{L}"]
# Blanks and look-alikes, characters younger than Unicode 9 and 14, marks in any order, letters of odd case.
ALPHABET = list("abcdABsStTrReEvVlLdDmM123 '!.,-_#[]\n\r\t \u2581\u2581") + """e\u0301 \u0301 \u0327 \u0315 \u00e9 \u00bd
    \u00b2 \u0663 \u2167 \u180e \u200b \ufeff \u4e2d \u6587 \u3042 \u30ab \ud55c \u1112 \u1161 \u11ab \u0130 \u017f
    \u212a \ufb01 \u212b \U0001d2c0 \U00011938 \U00011935 \U00011930 \u0898 \ua7cb \U00010d50 \U00016ea0 \U00031350
    \U0001e030 \U00010d40 \U00011de0 \U0001f44d \ud7a3 \u1e9b\u0323 \u0344 \u0958 <s> <t> [A] [B] tok token word \u0897
    \u2427 \U0001cc00 \u0378 \ue000 \u2460 \u24b6 \u200d \u03a3 \u00df""".split() + ["\x85", "\xa0", "\u2003", "\u3000"]


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def byte_level(prefix=False, regex=True):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def metaspace(scheme, split_too):
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split_too}


def sequence(key, parts):
    return {"type": "Sequence", key: parts}


def added(content, token_id, **flags):
    base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": content, **base, **flags}


def document(vocab, merges, normalizer=None, pre=None, post=None, decoder=None, tokens=(), **model):
    base = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(tokens),
            "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": post, "decoder": decoder,
            "model": {**base, **model, "vocab": vocab, "merges": merges}}


def numbered(pieces):
    return {piece: i for i, piece in enumerate(pieces)}


def hand_made():
    abc = numbered(["a", "b", "c", "ab", "abc"])
    for ignore in (False, True):
        yield "T01 ignore_merges %s" % ignore, document(abc, [["a", "b"]], ignore_merges=ignore), ["abc", "ab", "abcabc"]
    letters = numbered(["x", " ", "\t", "\n", "A", "B", "[", "]"])
    for right in (True, False):
        tokens = [added("[A]", 8, lstrip=True, rstrip=True, special=True),
                  added("[B]", 9, lstrip=True, rstrip=right, special=True)]
        texts = ["[A] [B]", "  [A]\t\n [B]  ", "x [A] x [B] x", "[A][B]", " \t[B] \n", "[A][A] [A]", "[A", "[B] [B] "]
        yield "T05 strip, right of B %s" % right, document(letters, [], tokens=tokens), texts
    full = numbered(list(BYTES.values()))
    digits = sequence("pretokenizers", [{"type": "Digits", "individual_digits": True}, byte_level()])
    yield "T10 digits", document(full, [["1", "2"]][:0], pre=digits), ["a1\u00bd\u00b2\u0663\u2167b12 3"]
    numbers = ["1234567812345678"[:n] for n in range(1, 9)] + ["3.14159", "0x1F3A9", "1,000,000", "v12345"]
    pairs = [a + b for a in "0123456789" for b in "0123456789"] + [a + b + c for a in "123456" for b in "123456" for c in "123456"]
    vocab = numbered(list(BYTES.values()) + pairs)
    merges = [[p[:-1], p[-1]] for p in pairs]
    for name, pattern in (("each", QWEN), ("threes", LLAMA3)):
        pre = sequence("pretokenizers", [split({"Regex": pattern}), byte_level(False, False)])
        yield "T11 numbers %s" % name, document(vocab, merges, pre=pre), numbers
    plus = numbered(["\\", "p", "{", "N", "}", "+", "1", "2", "12", "\\p{N}+1"])
    for kind in ("String", "Regex"):
        doc = document(plus, [["1", "2"]], pre=split({kind: r"\p{N}+"}, "Removed"))
        yield "T12 pattern as %s" % kind, doc, ["12\\p{N}+12", "1\\p{N}2", "+12+"]
    blanks = [chr(c) for c in [0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000,
                               0x200B, 0x180E, 0xFEFF]]
    bang = numbered(list(BYTES.values()))
    bang_merges = []
    for blank in blanks:  # a merge of ! with the blank shows whether both are one piece
        text = "".join(BYTES[b] for b in ("!" + blank).encode())
        for n in range(2, len(text) + 1):
            if text[:n] not in bang:
                bang[text[:n]] = len(bang)
                bang_merges.append([text[:n - 1], text[n - 1]])
    texts = [t for blank in blanks for t in ("!" + blank, "!" + blank + "a", "a" + blank + "!", blank + blank + "!")]
    yield "T14 blanks GPT-2", document(bang, bang_merges, pre=byte_level()), texts
    pre = sequence("pretokenizers", [split({"Regex": QWEN}), byte_level(False, False)])
    yield "T14 blanks Qwen", document(bang, bang_merges, pre=pre), texts
    thumb = ["<0x%02X>" % b for b in "\U0001f44d".encode()]
    for fuse in (True, False):
        vocab = numbered(["<unk>", "a", "<0x0A>"] + thumb)
        texts = ["a\na", "\n\n", "a\U0001f44da", "\u4e2d\u6587a", "\u4e2d\n\u6587", "a\u4e2d\U0001f44d\u6587\n", "\u4e2d\u4e2d"]
        yield ("T18 byte fallback, fuse %s" % fuse,
               document(vocab, [], unk_token="<unk>", fuse_unk=fuse, byte_fallback=True), texts)
    yield "T18 no unk", document(numbered(["a", "b", "ab"]), [["a", "b"]]), ["a\u4e2db", "\u4e2d", "acb"]
    crossing = numbered(["\u2581", "a", "b", ".", "\u2581a", "a\u2581", ".\u2581", "\u2581\u2581", "b\u2581a", "ab"])
    crossing_merges = [["a", "\u2581"], ["\u2581", "a"], [".", "\u2581"], ["\u2581", "\u2581"], ["b", "\u2581a"], ["a", "b"]]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    texts = ["a b a. b  a", "b a", "ab a", ". a", "a  a", "x a", " a a a"]
    yield "merges across blanks", document(crossing, crossing_merges, normalizer=spaces), texts


class Maker:
    def __init__(self, seed):
        self.rnd = random.Random(seed)

    def chance(self, p):
        return self.rnd.random() < p

    def text(self):
        alphabet = ALPHABET if self.chance(.6) else self.rnd.sample(ALPHABET, 6)
        n = self.rnd.randint(0, 12) if self.chance(.6) else self.rnd.randint(0, 60)
        return "".join(self.rnd.choice(alphabet) for _ in range(n))

    def pattern(self):
        if self.chance(.25):
            return {"String": self.rnd.choice(["a", " ", "ab", "\u2581", r"\p{N}+", ".", " \u2581"])}
        return {"Regex": self.rnd.choice(PATTERNS)}

    def normalizer(self, depth=0):
        kind = self.rnd.choice(["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "Prepend", "Replace", "Replace", "Sequence"])
        if kind == "Strip":
            return {"type": kind, "strip_left": self.chance(.5), "strip_right": self.chance(.5)}
        if kind == "Prepend":
            return {"type": kind, "prepend": self.rnd.choice(["\u2581", " ", "ab"])}
        if kind == "Replace":
            return {"type": kind, "pattern": self.pattern(), "content": self.rnd.choice(["\u2581", "", "x", " ", "ab"])}
        if kind == "Sequence":
            return sequence("normalizers", [self.normalizer(depth + 1) for _ in range(self.rnd.randint(0, 3) if depth < 2 else 0)])
        return {"type": kind}

    def pre_tokenizer(self, first_allowed):
        """The pre-tokenizer and whether it maps bytes."""
        if self.chance(.15):
            return None, False
        behaviors = ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
        parts = []
        for i in range(self.rnd.randint(0, 3)):
            kind = self.rnd.random()
            if kind < .6:
                parts.append(split(self.pattern(), self.rnd.choice(behaviors), self.chance(.3)))
            elif kind < .8:
                parts.append({"type": "Digits", "individual_digits": self.chance(.5)})
            else:
                schemes = ["always", "never"] + ["first"] * (first_allowed and i == 0)
                parts.append(metaspace(self.rnd.choice(schemes), self.chance(.5)))
        maps = self.chance(.5)
        if maps:
            parts.append(byte_level(self.chance(.3), self.chance(.5)))
        single = len(parts) == 1 and self.chance(.5)
        return (parts[0] if single else sequence("pretokenizers", parts)), maps

    def pieces(self, maps):
        vocab = numbered(["<unk>", "<s>"])
        known = BYTES.values() if maps else sorted({c for a in ALPHABET for c in a})
        for piece in known:
            if self.chance(.97 if maps else .8):
                vocab.setdefault(piece, len(vocab))
        fallback = self.chance(.5)
        for b in range(256 * fallback):
            if self.chance(.95):
                vocab.setdefault("<0x%02X>" % b, len(vocab))
        merges = []
        for _ in range(self.rnd.randint(0, 150)):
            text = "".join(self.rnd.choice(ALPHABET) for _ in range(self.rnd.randint(2, 3)))
            if maps:
                text = "".join(BYTES[b] for b in text.encode())
            for i in range(1, len(text)):
                a, b = text[:i], text[i]
                if a in vocab and b in vocab and [a, b] not in merges:
                    vocab.setdefault(a + b, len(vocab))
                    merges.append([a, b])
        self.rnd.shuffle(merges)
        if self.chance(.3) and not any(" " in piece for pair in merges for piece in pair):
            merges = [" ".join(pair) for pair in merges]
        return vocab, merges, fallback

    def tokens(self, vocab):
        contents = ["<s>", "<t>", "[A]", "[B]", "tok", "token", "word", " ", "\n", "\u00e9", "e\u0301", "ab", "\u2581a", "a\u2581",
                    "A b", "\u4e2d"]
        free = len(vocab)
        for content in self.rnd.sample(contents, self.rnd.randint(0, 6)):
            flags = {"single_word": .25, "lstrip": .25, "rstrip": .25, "normalized": .4, "special": .4}
            yield added(content, vocab.get(content, free), **{k: self.chance(p) for k, p in flags.items()})
            free += content not in vocab

    def post_processor(self, vocab):
        if self.chance(.5):
            return None
        behind = [{"SpecialToken": {"id": "<unk>", "type_id": 0}}] if self.chance(.5) else []
        text = {"Sequence": {"id": "A", "type_id": 0}}
        ids = {"<s>": [vocab["<s>"]], "<unk>": [vocab["<unk>"], vocab["<s>"]]}
        post = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text] + behind,
                "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {k: {"id": k, "ids": v, "tokens": [k] * len(v)} for k, v in ids.items()}}
        return sequence("processors", [byte_level(True), post]) if self.chance(.3) else post

    def decoder(self):
        replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
        return self.rnd.choice([
            None, byte_level(True), {"type": "ByteFallback"}, metaspace(self.rnd.choice(["always", "never", "first"]), True),
            sequence("decoders", [replace, {"type": "ByteFallback"}, {"type": "Fuse"},
                                  {"type": "Strip", "content": " ", "start": 1, "stop": 0}])])

    def document(self):
        normalizer = self.normalizer() if self.chance(.7) else None
        pre, maps = self.pre_tokenizer(normalizer is None)
        vocab, merges, fallback = self.pieces(maps)
        return document(vocab, merges, normalizer, pre, self.post_processor(vocab), self.decoder(), list(self.tokens(vocab)),
                        unk_token=self.rnd.choice([None, "<unk>", "<unk>"]), fuse_unk=self.chance(.5), byte_fallback=fallback,
                        ignore_merges=self.chance(.3))


def clear(doc, tok):
    """No two added tokens are equal, and none is empty, after normalisation (which one counts is not defined)."""
    texts = [t["content"] for t in doc["added_tokens"] if t["normalized"]]
    if tok.normalizer is not None:
        texts = [tok.normalizer.normalize_str(t) for t in texts]
    return all(texts) and len(set(texts)) == len(texts)


def answer(name, doc, texts):
    tok = Tokenizer.from_str(json.dumps(doc))
    line = {"name": name, "tokenizer": doc, "texts": texts, "ids": [tok.encode(t).ids for t in texts]}
    if not any(t["normalized"] for t in doc["added_tokens"]):  # the library then decodes to the normalised text
        line["decoded"] = [tok.decode(ids, skip_special_tokens=False) for ids in line["ids"]]
    return line if clear(doc, tok) else None


def main():
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    n_random = int(sys.argv[3]) if len(sys.argv) > 3 else 60
    lines = [answer(*case) for case in hand_made()]
    maker = Maker(seed)
    while n_random > 0:
        line = answer("random %d.%d" % (seed, n_random), maker.document(), [maker.text() for _ in range(25)])
        if line:
            lines.append(line)
            n_random -= 1
    with open(sys.argv[1], "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as out:
        for line in lines:
            out.write((json.dumps(line, separators=(",", ":")) + "\n").encode())


main()
