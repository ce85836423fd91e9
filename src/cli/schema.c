#include "schema.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "recipe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(S, m)   .offset = offsetof(S, m), .field_bytes = sizeof(((S *)0)->m)
#define COUNTED(S, m) FIELD(S, m), .aux_offset = offsetof(S, n_##m)

static const qc_key calibration_keys[] = {
#define S qc_recipe_calibration
    {"text", QC_KEY_PATH, FIELD(S, text), .help = "text to calibrate with (.txt, .jsonl or tokenized .npy)"},
    {"statistics", QC_KEY_PATH, FIELD(S, statistics),
     .help = "statistics made earlier by qcalib, or for method rtn an importance matrix of llama.cpp, "
             "instead of a text"},
    {"windows", QC_KEY_INT, FIELD(S, windows), .min = 1, .max = 1e6, .unit = "windows", .deflt = "16",
     .help = "calibration windows"},
    {"length", QC_KEY_INT, FIELD(S, length), .min = 2, .max = 1 << 20, .words = "auto", .unit = "tokens",
     .deflt = "auto", .help = "length of a calibration window; auto is 2048 or what the model allows"},
    {"sample", QC_KEY_ENUM, FIELD(S, sample), .words = "even|random", .deflt = "even",
     .help = "where in the text the windows are taken: evenly spread, or one at random in each of as many "
             "equal parts"},
    {"seed", QC_KEY_INT, FIELD(S, seed), .min = 0, .max = 9007199254740992.0, .deflt = "0",
     .help = "seed of sample random"},
    {"documents", QC_KEY_ENUM, FIELD(S, documents), .words = "whole|blank_line", .deflt = "whole",
     .help = "what is one document of a .txt file: all of it, or what stands between blank lines"},
    {"plain_special", QC_KEY_BOOL, FIELD(S, plain_special), .deflt = "false",
     .help = "text that spells a special token, as <s>, is ordinary text, not that token"},
    {"experts", QC_KEY_ENUM, FIELD(S, experts), .words = "routed|all", .deflt = "routed",
     .help =
         "whose inputs an expert's statistics are of: the tokens that the router sends to it, or all tokens"},
    {"perplexity_limit", QC_KEY_FLOAT, FIELD(S, perplexity_limit), .min = 1, .max = 1e12, .deflt = "1000",
     .help = "perplexity of the 16-bit model on the first of the text above which a warning says that model "
             "and text hardly fit"},
    {0}
#undef S
};

static const qc_key weights_keys[] = {
#define S qc_recipe_weights
    {"bits", QC_KEY_INT, FIELD(S, bits), .min = 2, .max = 8, .unit = "bits", .deflt = "4",
     .help = "bits per weight"},
    {"group", QC_KEY_INT, FIELD(S, group), .min = 16, .max = 1024, .multiple = 8, .words = "channel",
     .word_value = -1, .unit = "columns", .deflt = "128",
     .help = "input columns that share a scale, or channel: one scale per row"},
    {"symmetric", QC_KEY_BOOL, FIELD(S, symmetric), .deflt = "true", .help = "grid without zero points"},
    {"search", QC_KEY_ENUM, FIELD(S, search), .words = "minmax|mse|ggml", .deflt = "mse",
     .help = "how scales are chosen: from the extremes, by the least squared error, or for Q4_0, Q4_1, Q5_0, "
             "Q5_1, Q8_0 as llama.cpp's own rounding"},
    {"scale", QC_KEY_ENUM, FIELD(S, scale), .words = "auto|f32|f16|bf16", .deflt = "auto",
     .help =
         "stored type of scales; auto is f16, but bf16 for a BF16 model of which an output is for engines "
         "that compute in the model's type (gptq, awq, compressed-tensors), since they would round f16 "
         "scales"},
    {"group_fallback", QC_KEY_ENUM, FIELD(S, group_fallback), .words = "error|channel|smaller|keep",
     .deflt = "error",
     .help = "where the group does not divide a matrix: refuse, one scale per row, a smaller group, or keep "
             "16 bit"},
    {0}
#undef S
};

static const qc_key activations_keys[] = {
#define S qc_recipe_activations
    {"bits", QC_KEY_INT, FIELD(S, bits), .min = 4, .max = 8, .words = "none", .unit = "bits", .deflt = "none",
     .help = "bits of the inputs of the linear layers"},
    {"dynamic", QC_KEY_ENUM, FIELD(S, dynamic), .words = "none|token|tensor", .now = "token",
     .deflt = "token", .help = "scale computed while running, per token or tensor"},
    {"group", QC_KEY_INT, FIELD(S, group), .min = 32, .max = 1024, .multiple = 32, .words = "none",
     .unit = "columns", .deflt = "none", .help = "columns that share a scale; none is one scale per token"},
    {0}
#undef S
};

static const qc_key embedding_keys[] = {
#define S qc_recipe_embedding
    {"bits", QC_KEY_INT, FIELD(S, bits), .min = 2, .max = 8, .words = "16", .word_value = 16, .unit = "bits",
     .deflt = "8", .help = "bits of embedding and head; 16 leaves them as they are"},
    {"group", QC_KEY_INT, FIELD(S, group), .min = 16, .max = 1024, .multiple = 8, .words = "channel",
     .word_value = -1, .unit = "columns", .deflt = "channel",
     .help = "columns of embedding and head that share a scale"},
    {"symmetric", QC_KEY_BOOL, FIELD(S, symmetric), .deflt = "true",
     .help = "grid of embedding and head without zero points"},
    {0}
#undef S
};

static const qc_key gptq_keys[] = {
#define S qc_recipe_gptq
    {"order", QC_KEY_ENUM, FIELD(S, order), .words = "none|static|min-pivot", .deflt = "static",
     .help = "order in which columns are rounded: as stored, by their second moment, or by the least pivot "
             "last"},
    {"damp", QC_KEY_FLOAT, FIELD(S, damp), .min = 0, .max = 1, .deflt = "0.01",
     .help = "damping as a fraction of the mean diagonal"},
    {"refit", QC_KEY_BOOL, FIELD(S, refit), .deflt = "true", .help = "fit scales again after the codes"},
    {"sweeps", QC_KEY_INT, FIELD(S, sweeps), .min = 0, .max = 100, .deflt = "2",
     .help = "sweeps of coordinate descent after the solve"},
    {"inputs", QC_KEY_ENUM, FIELD(S, inputs), .words = "quantized|original", .deflt = "quantized",
     .help = "whose inputs statistics are taken from: the model as quantized so far, or the 16-bit model"},
    {"shrink", QC_KEY_FLOAT, FIELD(S, shrink), .min = 0, .max = 1, .deflt = "0.1",
     .help =
         "how far correlations of inputs shrink, as other text has others; above 0.6 only with correct 0"},
    {"correct", QC_KEY_FLOAT, FIELD(S, correct), .min = 0, .max = 1, .deflt = "0.5",
     .help =
         "share of the targets' correction for what the layers before got wrong; none with inputs original"},
    {0}
#undef S
};

static const qc_key awq_keys[] = {
#define S qc_recipe_awq
    {"ratios", QC_KEY_INT, FIELD(S, ratios), .min = 2, .max = 100, .deflt = "20",
     .help = "exponents that are tried for the scales of an input"},
    {"sites", QC_KEY_ENUM, FIELD(S, sites), .words = "norms|all", .deflt = "all",
     .help = "inputs that are scaled: those that a norm produces, or all"},
    {0}
#undef S
};

static const qc_key smoothquant_keys[] = {
#define S qc_recipe_smoothquant
    {"alpha", QC_KEY_FLOAT, FIELD(S, alpha), .min = 0, .max = 1, .words = "auto", .word_value = -1,
     .deflt = "auto",
     .help = "share of the difficulty that goes from activations to weights; auto: each input "
             "its own, by the least error"},
    {"sites", QC_KEY_ENUM, FIELD(S, sites), .words = "norms|all", .deflt = "all",
     .help = "inputs that are scaled: those that a norm produces, or all"},
    {0}
#undef S
};

static const qc_key override_keys[] = {
#define S qc_override
    {"match", QC_KEY_STRING, FIELD(S, match), .required = true, .selector = true,
     .help = "glob over tensor names (* ? [...])"},
    {"bits", QC_KEY_INT, FIELD(S, bits), .min = 2, .max = 8, .words = "16", .word_value = 16, .unit = "bits",
     .help = "bits per weight; 16 leaves the tensor as it is"},
    {"group", QC_KEY_INT, FIELD(S, group), .min = 16, .max = 1024, .multiple = 8, .words = "channel",
     .word_value = -1, .unit = "columns", .help = "input columns that share a scale"},
    {"symmetric", QC_KEY_BOOL, FIELD(S, symmetric), .help = "grid without zero points"},
    {0}
#undef S
};

static const qc_key budget_keys[] = {
#define S qc_recipe_budget
    {"bits_average", QC_KEY_FLOAT, FIELD(S, bits_average), .min = 2, .max = 16, .unit = "bits",
     .help = "average bits per weight of all matrices together, scales included, to stay within"},
    {"size", QC_KEY_SIZE, FIELD(S, size_bytes), .unit = "bytes",
     .help = "size of the artifact to stay within"},
    {0}
#undef S
};

static const qc_key quantize_keys[] = {
#define S qc_recipe_quantize
    {"method", QC_KEY_ENUM, FIELD(S, method), .words = "rtn|gptq|awq|awq+gptq|smoothquant|smoothquant+gptq",
     .deflt = "rtn",
     .help =
         "how weights are rounded; all but rtn need calibration.text, which rtn can use too; rtn and gptq "
         "take calibration.statistics instead"},
    {"weights", QC_KEY_MAP, FIELD(S, weights), .sub = weights_keys, .help = "grid of the linear layers"},
    {"activations", QC_KEY_MAP, FIELD(S, activations), .sub = activations_keys, .words = "none",
     .help = "grid of the activations"},
    {"embedding", QC_KEY_MAP, FIELD(S, embedding), .sub = embedding_keys,
     .help = "grid of embedding and head"},
    {"gptq", QC_KEY_MAP, FIELD(S, gptq), .sub = gptq_keys, .help = "options of method gptq"},
    {"awq", QC_KEY_MAP, FIELD(S, awq), .sub = awq_keys, .help = "options of methods awq and awq+gptq"},
    {"smoothquant", QC_KEY_MAP, FIELD(S, smoothquant), .sub = smoothquant_keys,
     .help = "options of methods smoothquant and smoothquant+gptq"},
    {"overrides", QC_KEY_LIST, COUNTED(S, overrides), .sub = override_keys, .elem_bytes = sizeof(qc_override),
     .help = "other grids for tensors by name, later ones win"},
    {"skip", QC_KEY_LIST, COUNTED(S, skip), .elem_bytes = sizeof(char *),
     .help = "globs of tensors that stay 16 bit"},
    {"budget", QC_KEY_MAP, FIELD(S, budget), .sub = budget_keys, .words = "none",
     .help = "choose bits and group per matrix, by what each does to the model on calibration.text"},
    {0}
#undef S
};

/* Figures of the report's evaluation, and of the run, that a gate may limit. */
#define GATE_NAMES                                                                                           \
    "ppl|ppl_ratio|delta_nll|kld_mean|kld_p99|kld_max|top1|account_error|fallbacks|size_bytes|seconds|"      \
    "peak_rss_bytes"

static const qc_key verify_keys[] = {
#define S qc_recipe_verify
    {"enabled", QC_KEY_BOOL, FIELD(S, enabled), .deflt = "true",
     .help = "measure what was written against the 16-bit model"},
    {"text", QC_KEY_PATH, FIELD(S, text),
     .help = "UTF-8 text to measure with; without it the bundled held-out text"},
    {"reference", QC_KEY_PATH, FIELD(S, reference),
     .help =
         "scores of the 16-bit model on the text, stored by qeval --save-reference, instead of running it; "
         "how the text is cut is then what they were made with"},
    {"protocol", QC_KEY_ENUM, FIELD(S, protocol), .words = "gptq|llama|full", .deflt = "gptq",
     .help = "how the text is cut: side by side, all of a window scored (gptq) or its second half as "
             "llama-perplexity does (llama); or overlapping, every token scored once (full)"},
    {"windows", QC_KEY_INT, FIELD(S, windows), .min = 1, .max = 1e9, .words = "all", .unit = "windows",
     .deflt = "16", .help = "windows to measure, or all"},
    {"length", QC_KEY_INT, FIELD(S, length), .min = 2, .max = 1 << 20, .words = "auto", .unit = "tokens",
     .deflt = "auto",
     .help = "length of a window; auto is 2048 (protocol llama: 512) or what the model allows"},
    {"stride", QC_KEY_INT, FIELD(S, stride), .min = 1, .max = 1 << 20, .words = "auto", .unit = "tokens",
     .deflt = "auto",
     .help = "from one window's start to the next's with protocol full; auto is half a window"},
    {"plain_special", QC_KEY_BOOL, FIELD(S, plain_special), .deflt = "false",
     .help = "text that spells a special token, as <s>, is ordinary text, not that token"},
    {"bos", QC_KEY_STRING, FIELD(S, bos), .deflt = "tokenizer",
     .help = "token in front of the text or of each window (docs/report.md): what the tokenizer adds "
             "(tokenizer), none, or the id of one"},
    {"gates", QC_KEY_LIMITS, COUNTED(S, gates), .words = GATE_NAMES,
     .help = "limits that the artifact must keep"},
    {"noise_floor", QC_KEY_BOOL, FIELD(S, noise_floor), .deflt = "false",
     .help = "also measure the reference against itself on 2 windows, with another number of threads and "
             "with the "
             "other arithmetic of run.compute: smaller differences mean nothing"},
    {"decide", QC_KEY_BOOL, FIELD(S, decide), .deflt = "false",
     .help =
         "score windows only until each gate on ppl_ratio, delta_nll, kld_mean and top1 is decided with 5 % "
         "error either way; one that is undecided after all windows has failed"},
    {0}
#undef S
};

static const qc_key run_keys[] = {
#define S qc_recipe_run
    {"device", QC_KEY_ENUM, FIELD(S, device), .deflt = "auto",
     .words = "auto|cpu|emulated|cuda|cuda:0|cuda:1|cuda:2|cuda:3|cuda:4|cuda:5|cuda:6|cuda:7",
     .help = "where to compute: auto is the CPU as long as the CUDA kernels have run under emulation only; "
             "emulated is for tests"},
    {"compute", QC_KEY_ENUM, FIELD(S, compute), .words = "f32|bf16", .deflt = "f32", .artifact = true,
     .help = "arithmetic of matrix products; bf16 rounds their inputs to 8 bits of mantissa and is several "
             "times faster "
             "where the processor has AMX or AVX512-BF16"},
    {"threads", QC_KEY_INT, FIELD(S, threads), .min = 1, .max = 1024, .words = "0", .unit = "threads",
     .deflt = "0", .help = "threads; 0 is one per usable processor. Results do not depend on it"},
    {"memory", QC_KEY_SIZE, FIELD(S, memory_bytes), .words = "none", .unit = "bytes", .deflt = "none",
     .help = "cap on peak memory, as 900MB or 2GiB"},
    {"scratch", QC_KEY_PATH, FIELD(S, scratch),
     .help = "folder for scratch files; without it $TMPDIR, then /tmp"},
    {"allow_nonfinite", QC_KEY_BOOL, FIELD(S, allow_nonfinite), .deflt = "false", .artifact = true,
     .help = "leave matrices with NaN or infinity in 16 bit instead of refusing them; measuring such a model "
             "fails, so verify.enabled must be false"},
    {0}
#undef S
};

static const qc_key emit_keys[] = {
#define S qc_recipe_emit
    {"format", QC_KEY_ENUM, FIELD(S, format), .words = "auto|qpk|gptq|awq|compressed-tensors|gguf|onnx|hf",
     .deflt = "auto", .help = "format of the output; auto goes by the extension of its path, .qpk or .gguf"},
    {"path", QC_KEY_PATH, FIELD(S, path), .required = true, .help = "where the output is written"},
    {"type", QC_KEY_STRING, FIELD(S, type),
     .help = "subtype of the format (gptq: v1, v2; hf: bf16, f16, f32; gguf: q4_k_m and others)"},
    {"engine", QC_KEY_ENUM, FIELD(S, engine), .words = "none|vllm|transformers|llama.cpp|onnxruntime",
     .deflt = "none",
     .help = "engine that must take the output: what it would refuse is refused before the work"},
    {"shard_size", QC_KEY_SIZE, FIELD(S, shard_bytes), .unit = "bytes", .deflt = "5GB",
     .help = "of an output that is a folder with safetensors: a new file is begun where the tensors of one "
             "would take more"},
    {"quantize", QC_KEY_MAP, FIELD(S, quantize), .aux_offset = offsetof(S, own_quantize),
     .sub = quantize_keys, .optional = true,
     .help =
         "another grid for this output; keys and defaults as in quantize, nothing is taken over from there"},
    {0}
#undef S
};

static const qc_key report_keys[] = {
#define S qc_recipe_report
    {"json", QC_KEY_PATH, FIELD(S, json), .help = "report as JSON"},
    {"junit", QC_KEY_PATH, FIELD(S, junit), .help = "gates as a JUnit XML file, for CI systems"},
    {"html", QC_KEY_PATH, FIELD(S, html), .help = "report as one HTML page with plots"},
    {"markdown", QC_KEY_PATH, FIELD(S, markdown), .help = "report as markdown that fits a comment"},
    {"manifest", QC_KEY_PATH, FIELD(S, manifest), .help = "SHA-256 of inputs, recipe and outputs as JSON"},
    {0}
#undef S
};

/* Kinds of events that can be counted as fallbacks. */
#define FALLBACK_NAMES                                                                                       \
    "rtn_fallback|group_fallback|scale_floor|nonfinite|damping|no_statistics|requantized|"                   \
    "expert_without_tokens"

const qc_key qc_schema[] = {
#define S qc_recipe
    {"model", QC_KEY_PATH, FIELD(S, model), .help = "checkpoint folder or packed file to read"},
    {"calibration", QC_KEY_MAP, FIELD(S, calibration), .sub = calibration_keys, .artifact = true,
     .help = "text that statistics are taken from, or statistics made earlier"},
    {"quantize", QC_KEY_MAP, FIELD(S, quantize), .sub = quantize_keys, .artifact = true,
     .help = "what is quantized and how"},
    {"verify", QC_KEY_MAP, FIELD(S, verify), .sub = verify_keys, .help = "measurement of what was written"},
    {"run", QC_KEY_MAP, FIELD(S, run), .sub = run_keys, .help = "machine"},
    {"allow", QC_KEY_LIMITS, COUNTED(S, allow), .words = FALLBACK_NAMES,
     .help = "fallbacks permitted per kind; more is exit code 6"},
    {"emit", QC_KEY_LIST, COUNTED(S, emit), .sub = emit_keys, .elem_bytes = sizeof(qc_recipe_emit),
     .help = "outputs"},
    {"report", QC_KEY_MAP, FIELD(S, report), .sub = report_keys, .help = "reports to write"},
    {0}
#undef S
};

/* ---- words ---- */

const char *qc_word_at(const char *words, int i, size_t *ret_bytes)
{
    for (; words && i > 0; i--) {
        words = strchr(words, '|');
        words = words ? words + 1 : NULL;
    }
    if (words)
        *ret_bytes = strcspn(words, "|");
    return words;
}

int qc_word_find(const char *words, const char *text)
{
    size_t n, n_text = strlen(text);
    const char *w;
    for (int i = 0; (w = qc_word_at(words, i, &n)); i++)
        if (n == n_text && memcmp(w, text, n) == 0)
            return i;
    return -1;
}

/* ---- keys ---- */

const qc_key *qc_schema_find(const char *path)
{
    const qc_key *table = qc_schema, *key = NULL;
    while (*path) {
        size_t n = strcspn(path, ".");
        bool index = n > 0 && strspn(path, "0123456789") == n;
        if (!(index && key && key->type == QC_KEY_LIST)) {
            for (key = table; key && key->name; key++)
                if (strlen(key->name) == n && memcmp(key->name, path, n) == 0)
                    break;
            if (!key || !key->name)
                return NULL;
            table = key->sub;
        }
        path += n + (path[n] == '.');
    }
    return key;
}

static int describe_number(const qc_key *key, const char *what, qc_buf *ret, qc_err *err)
{
    if (key->max > 1e15)
        QC_TRY(qc_buf_printf(ret, err, "%s from %.15g", what, key->min));
    else
        QC_TRY(qc_buf_printf(ret, err, "%s %.15g to %.15g", what, key->min, key->max));
    if (key->multiple)
        QC_TRY(qc_buf_printf(ret, err, " in steps of %d", key->multiple));
    return key->words ? qc_buf_printf(ret, err, " or %s", key->words) : QC_OK;
}

static int describe_words(const char *words, qc_buf *ret, qc_err *err)
{
    size_t n;
    const char *w;
    for (int i = 0; (w = qc_word_at(words, i, &n)); i++)
        QC_TRY(qc_buf_printf(ret, err, "%s%.*s", i ? ", " : "", (int)n, w));
    return QC_OK;
}

int qc_key_describe(const qc_key *key, qc_buf *ret, qc_err *err)
{
    switch (key->type) {
    case QC_KEY_STRING:
        return qc_buf_printf(ret, err, "string");
    case QC_KEY_PATH:
        return qc_buf_printf(ret, err, "path");
    case QC_KEY_BOOL:
        return qc_buf_printf(ret, err, "true or false");
    case QC_KEY_INT:
        return describe_number(key, "whole number", ret, err);
    case QC_KEY_FLOAT:
        return describe_number(key, "number", ret, err);
    case QC_KEY_SIZE:
        return qc_buf_printf(ret, err, "size%s%s", key->words ? " or " : "", key->words ? key->words : "");
    case QC_KEY_ENUM:
        QC_TRY(qc_buf_printf(ret, err, "one of "));
        return describe_words(key->words, ret, err);
    case QC_KEY_MAP:
        return qc_buf_printf(ret, err, "mapping%s%s", key->words ? " or " : "", key->words ? key->words : "");
    case QC_KEY_LIST:
        return qc_buf_printf(ret, err, "list of %s", key->sub ? "mappings" : "strings");
    case QC_KEY_LIMITS:
        QC_TRY(qc_buf_printf(ret, err, "mapping to numbers of "));
        return describe_words(key->words, ret, err);
    }
    return QC_OK;
}

/* ---- values ---- */

int qc_parse_int(const char *text, int64_t *ret, qc_err *err)
{
    const char *p = text + (*text == '-' || *text == '+');
    int64_t value = 0;
    if (!*p || p[strspn(p, "0123456789")])
        return qc_fail(err, QC_E_INPUT, "'%.60s' is not a whole number", text);
    for (; *p; p++)
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *p - '0', &value))
            return qc_fail(err, QC_E_INPUT, "'%.60s' is too large", text);
    *ret = *text == '-' ? -value : value;
    return QC_OK;
}

int qc_parse_float(const char *text, double *ret, qc_err *err)
{
    char *end;
    /* plain decimal notation only: strtod alone would take hexadecimal, inf and nan too */
    if (!*text || text[strspn(text, "0123456789+-.eE")])
        return qc_fail(err, QC_E_INPUT, "'%.60s' is not a number", text);
    double value = strtod(text, &end);
    if (*end)
        return qc_fail(err, QC_E_INPUT, "'%.60s' is not a number", text);
    if (!isfinite(value))
        return qc_fail(err, QC_E_INPUT, "'%.60s' is too large", text);
    *ret = value;
    return QC_OK;
}

int qc_parse_size(const char *text, uint64_t *ret_bytes, qc_err *err)
{
    static const struct {
        const char *unit;
        double factor;
    } units[] = {{"", 1},      {"B", 1},        {"kB", 1e3},     {"KB", 1e3},     {"MB", 1e6},    {"GB", 1e9},
                 {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
    size_t n = strspn(text, "0123456789."), i = 0, n_units = sizeof units / sizeof units[0];
    const char *unit = text + n + (text[n] == ' ');
    char number[40];
    double value = 0;
    while (i < n_units && strcmp(units[i].unit, unit) != 0)
        i++;
    if (n > 0 && n < sizeof number && i < n_units) {
        memcpy(number, text, n);
        number[n] = 0;
        if (qc_parse_float(number, &value, NULL) == QC_OK) {
            value *= units[i].factor;
            if (value > 0x1p62)
                return qc_fail(err, QC_E_INPUT, "'%.60s' is too large", text);
            *ret_bytes = (uint64_t)value;
            return QC_OK;
        }
    }
    return qc_fail(err, QC_E_INPUT,
                   "'%.60s' is not a size (as 4096, 420MB or 2GiB; kB, MB, GB, TB are powers of 1000, "
                   "KiB, MiB, GiB, TiB of 1024)",
                   text);
}

static void put_int(const qc_key *key, int64_t value, void *field)
{
    if (key->field_bytes == sizeof(int64_t))
        memcpy(field, &value, sizeof value);
    else
        *(int *)field = (int)value;
}

static int store_int(const qc_key *key, const char *text, void *field, qc_err *err)
{
    int64_t value;
    if (key->words && strcmp(text, key->words) == 0) {
        put_int(key, key->word_value, field);
        return QC_OK;
    }
    qc_err why;
    qc_buf type = {0};
    int rc = qc_parse_int(text, &value, &why);
    if (rc == QC_OK && (double)value >= key->min && (double)value <= key->max &&
        (!key->multiple || value % key->multiple == 0)) {
        put_int(key, value, field);
        return QC_OK;
    }
    if (qc_key_describe(key, &type, err) < 0)
        return QC_E_RESOURCE;
    if (rc == QC_OK)
        rc = qc_fail(err, QC_E_INPUT, "%lld is out of range (%s expected)", (long long)value, type.data);
    else
        rc = qc_fail(err, QC_E_INPUT, "%s (%s expected)", why.msg, type.data);
    qc_buf_clear(&type);
    return rc;
}

static int store_float(const qc_key *key, const char *text, double *field, qc_err *err)
{
    double value;
    if (key->words && strcmp(text, key->words) == 0) {
        *field = (double)key->word_value;
        return QC_OK;
    }
    QC_TRY(qc_parse_float(text, &value, err));
    if (value < key->min || value > key->max)
        return qc_fail(err, QC_E_INPUT, "%.60s is out of range (%.15g to %.15g)", text, key->min, key->max);
    *field = value;
    return QC_OK;
}

static int store_size(const qc_key *key, const char *text, uint64_t *field, qc_err *err)
{
    uint64_t value = 0;
    if (!key->words || strcmp(text, key->words) != 0) {
        QC_TRY(qc_parse_size(text, &value, err));
        if (value == 0)
            return qc_fail(err, QC_E_INPUT, "a size of 0 bytes%s%s", key->words ? "; no limit is " : "",
                           key->words ? key->words : "");
    }
    *field = value;
    return QC_OK;
}

static int store_bool(const qc_key *key, const char *text, void *field, qc_err *err)
{
    bool yes = strcmp(text, "true") == 0;
    if (!yes && strcmp(text, "false") != 0)
        return qc_fail(err, QC_E_INPUT, "'%.60s' is not true or false", text);
    if (key->field_bytes == sizeof(bool))
        *(bool *)field = yes;
    else
        *(int *)field = yes;
    return QC_OK;
}

static int store_enum(const qc_key *key, const char *text, int *field, qc_err *err)
{
    int value = qc_word_find(key->words, text);
    if (value >= 0) {
        *field = value;
        return QC_OK;
    }
    qc_buf type = {0};
    if (describe_words(key->words, &type, err) < 0)
        return QC_E_RESOURCE;
    int rc = qc_fail(err, QC_E_INPUT, "'%.60s' is none of %s", text, type.data);
    qc_buf_clear(&type);
    return rc;
}

static int store_string(const qc_key *key, const char *text, const char *folder, char **field, qc_err *err)
{
    if (!*text)
        return qc_fail(err, QC_E_INPUT, "empty %s", key->type == QC_KEY_PATH ? "path" : "string");
    char *copy = key->type == QC_KEY_PATH ? qc_path_join(folder, text) : qc_strdup(text);
    if (!copy)
        return qc_fail_nomem(err, "recipe", strlen(text) + 1);
    qc_free(*field);
    *field = copy;
    return QC_OK;
}

int qc_key_store(const qc_key *key, const char *text, const char *folder, void *field, qc_err *err)
{
    switch (key->type) {
    case QC_KEY_BOOL:
        return store_bool(key, text, field, err);
    case QC_KEY_INT:
        return store_int(key, text, field, err);
    case QC_KEY_FLOAT:
        return store_float(key, text, field, err);
    case QC_KEY_SIZE:
        return store_size(key, text, field, err);
    case QC_KEY_ENUM:
        return store_enum(key, text, field, err);
    default:
        return store_string(key, text, folder, field, err);
    }
}
