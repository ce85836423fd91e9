/* The recipe: everything a conversion was asked for, as plain data. Made from a YAML file, --set and flags.
 */
#ifndef QC_CLI_RECIPE_H
#define QC_CLI_RECIPE_H

#include "backend.h"
#include "opt.h"
#include "policy.h"
#include "qc_err.h"
#include "writer.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum {
    QC_METHOD_RTN = 0,
    QC_METHOD_GPTQ,
    QC_METHOD_AWQ,
    QC_METHOD_AWQ_GPTQ,
    QC_METHOD_SMOOTHQUANT,
    QC_METHOD_SMOOTHQUANT_GPTQ
} qc_method;

/* In the order of the words of run.device; QC_DEVICE_CUDA_0 + n is device n. */
typedef enum {
    QC_DEVICE_AUTO = 0,
    QC_DEVICE_CPU,
    QC_DEVICE_EMULATED,
    QC_DEVICE_CUDA,
    QC_DEVICE_CUDA_0,
    QC_N_DEVICES = QC_DEVICE_CUDA_0 + 8
} qc_device;

typedef enum {
    QC_EMIT_AUTO = 0, /* never after qc_recipe_load: replaced by what the path's extension says */
    QC_EMIT_QPK,
    QC_EMIT_GPTQ,
    QC_EMIT_AWQ,
    QC_EMIT_COMPRESSED_TENSORS,
    QC_EMIT_GGUF,
    QC_EMIT_ONNX,
    QC_EMIT_HF
} qc_emit_format;

typedef struct qc_recipe_calibration {
    char *text;       /* NULL = none */
    char *statistics; /* file with statistics instead of a text; NULL = none */
    int64_t windows;
    int64_t length; /* tokens; 0 = min(2048, what the model allows) */
    int sample;     /* qc_sample */
    int64_t seed;
    int documents; /* qc_documents */
    bool plain_special;
    int experts;             /* 0 = each its own tokens, 1 = all tokens */
    double perplexity_limit; /* a warning above */
} qc_recipe_calibration;

typedef enum { QC_SCALE_AUTO = 0, QC_SCALE_F32, QC_SCALE_F16, QC_SCALE_BF16 } qc_recipe_scale;

typedef struct qc_recipe_weights {
    int bits;
    int64_t group; /* -1 = one scale per row */
    bool symmetric;
    int search;         /* qc_search */
    int scale;          /* qc_recipe_scale */
    int group_fallback; /* qc_group_fallback */
} qc_recipe_weights;

typedef struct qc_recipe_activations {
    int bits;      /* 0 = not quantized */
    int dynamic;   /* 0 none (static), 1 token, 2 tensor */
    int64_t group; /* 0 = one scale per token */
} qc_recipe_activations;

typedef struct qc_recipe_embedding {
    int bits; /* 16 = left as it is */
    int64_t group;
    bool symmetric;
} qc_recipe_embedding;

typedef struct qc_recipe_gptq {
    int order; /* qc_gptq_order */
    double damp;
    bool refit;
    int64_t sweeps;
    int inputs;             /* 0 quantized, 1 original */
    double shrink, correct; /* 0 .. 1 */
} qc_recipe_gptq;

/* Inputs that are scaled: those that a norm produces, or all four of a layer. */
typedef enum { QC_SITES_NORMS = 0, QC_SITES_ALL } qc_recipe_sites;

typedef struct qc_recipe_awq {
    int64_t ratios;
    int sites; /* qc_recipe_sites */
} qc_recipe_awq;

typedef struct qc_recipe_smoothquant {
    double alpha; /* -1 = each input its own */
    int sites;    /* qc_recipe_sites */
} qc_recipe_smoothquant;

typedef struct qc_recipe_budget {
    double bits_average; /* 0 = none */
    uint64_t size_bytes; /* 0 = none */
} qc_recipe_budget;

typedef struct qc_recipe_quantize {
    int method; /* qc_method */
    qc_recipe_weights weights;
    qc_recipe_activations activations;
    qc_recipe_embedding embedding;
    qc_recipe_gptq gptq;
    qc_recipe_awq awq;
    qc_recipe_smoothquant smoothquant;
    qc_override *overrides; /* later ones win */
    int n_overrides;
    char **skip; /* globs */
    int n_skip;
    qc_recipe_budget budget;
} qc_recipe_quantize;

typedef struct qc_limit {
    char *name;
    double limit;
} qc_limit;

typedef struct qc_recipe_verify {
    bool enabled;
    char *text;         /* NULL = the bundled held-out text */
    char *reference;    /* stored reference that is compared with; NULL = the model itself is run */
    int protocol;       /* qc_protocol */
    int64_t windows;    /* 0 = all that the text gives */
    int64_t length;     /* tokens; 0 = min(2048, what the model allows), protocol llama: at most 512 */
    int64_t stride;     /* protocol full; 0 = length / 2 */
    bool plain_special; /* text that spells a special token is ordinary text */
    char *bos;          /* "tokenizer", "none", an id */
    qc_limit *gates;
    int n_gates;
    bool noise_floor; /* also measure the reference against itself */
    bool decide;      /* stop scoring windows once the gates on means are decided */
} qc_recipe_verify;

typedef struct qc_recipe_run {
    int device;            /* qc_device */
    int compute;           /* qc_compute */
    int threads;           /* 0 = one per usable processor */
    uint64_t memory_bytes; /* 0 = no cap */
    char *scratch;         /* NULL = $TMPDIR, then /tmp */
    bool allow_nonfinite;
} qc_recipe_run;

/* In the order of the schema's words. */
typedef enum { QC_ENGINE_NONE = 0 } qc_recipe_engine;

typedef struct qc_recipe_emit {
    int format; /* qc_emit_format */
    char *path;
    char *type;           /* subtype of the format; NULL = none */
    uint64_t shard_bytes; /* of safetensors in a folder, > 0 */
    int engine;           /* qc_recipe_engine: that must take the output */
    bool own_quantize;    /* has a grid of its own, in: */
    qc_recipe_quantize quantize;
} qc_recipe_emit;

typedef struct qc_recipe_report {
    char *json, *junit, *html, *markdown, *manifest; /* NULL = not written */
} qc_recipe_report;

typedef struct qc_recipe {
    char *model; /* NULL if none was named */
    char *file;  /* the recipe's own; NULL without one */
    qc_recipe_calibration calibration;
    qc_recipe_quantize quantize;
    bool asks_grid; /* something below `quantize` was given: a quantized source is put on that grid */
    qc_recipe_verify verify;
    qc_recipe_run run;
    qc_limit *allow; /* fallbacks permitted per kind */
    int n_allow;
    qc_recipe_emit *emit;
    int n_emit;
    qc_recipe_report report;
} qc_recipe;

/* Recipe from the command line: the file if the program takes recipes and its first operand is one (else the
 * operand is the model), then flags and --set in their order, which win. QC_E_INPUT: the file is broken
 * (file:line:column, key, what is wrong, what was expected); QC_E_USAGE: the same for a flag;
 * QC_E_UNSUPPORTED: a known key whose feature is not built yet, found after everything else was checked. Free
 * with qc_recipe_clear. */
int qc_recipe_load(const qc_args *args, qc_recipe *ret, qc_err *err) QC_WARN_UNUSED;

/* The same from a YAML text (n_bytes); `name` is for messages, relative paths are put behind `folder` (NULL:
 * left as they are); args may be NULL. */
int qc_recipe_parse(const char *text, size_t n_bytes, const char *name, const char *folder,
                    const qc_args *args, qc_recipe *ret, qc_err *err) QC_WARN_UNUSED;

/* Format of an output of a recipe that was loaded; never NULL. */
const qc_writer_format *qc_recipe_format(const qc_recipe_emit *emit);

/* Release what it owns and set all of it to zero. */
void qc_recipe_clear(qc_recipe *recipe);

/* Normalised form with all keys and defaults, for reports / only the keys that decide the bytes of artifacts
 * (no paths, threads, memory), for manifests. NULL when out of memory; free with cJSON_Delete. */
cJSON *qc_recipe_to_json(const qc_recipe *recipe);
cJSON *qc_recipe_artifact_json(const qc_recipe *recipe);

/* The quantize part alone (the recipe's or an emit entry's own), for the manifest inside an artifact. */
cJSON *qc_recipe_quantize_json(const qc_recipe_quantize *quantize);

/* Rules for quant/policy.h from the recipe's `quantize` or an emit entry's own; arrays are borrowed. `scale`
 * is the type of scales where that says auto. */
void qc_recipe_policy(const qc_recipe_quantize *quantize, qc_dtype scale, qc_policy *ret);

#endif
