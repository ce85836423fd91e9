#include "engine_lint.h"

#include "qc_alloc.h"
#include "qc_fp.h"

#include <math.h>
#include <string.h>

const char qc_engine_names[] = "vllm|transformers|llama.cpp|onnxruntime";

typedef struct lint {
    const char *engine;
    const qc_lint_input *in;
    qc_event_list *findings;
} lint;

static bool is_format(const lint *l, const char *format)
{
    return strcmp(l->in->format, format) == 0;
}

#define REFUSES(l, kind, subject, ...)                                                                       \
    qc_event_add((l)->findings, QC_EVENT_FALLBACK, kind, subject, 1, err, __VA_ARGS__)
#define NOTES(l, kind, subject, ...)                                                                         \
    qc_event_add((l)->findings, QC_EVENT_NOTE, kind, subject, 1, err, __VA_ARGS__)

/* ---- names ---- */

/* Matrices that engines put into one: the members of a fused one lie in the same layer. */
static const char *const fused[][4] = {
    {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", NULL},
    {"mlp.gate_proj.weight", "mlp.up_proj.weight", NULL},
};

static bool ends_with(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);
    return n >= m && strcmp(name + n - m, suffix) == 0;
}

/* Tensor with the same stem but another ending; NULL if there is none. */
static const qc_tensor_info *sibling(const lint *l, const char *name, const char *ending, const char *other)
{
    size_t stem = strlen(name) - strlen(ending);
    for (int64_t i = 0; i < l->in->n_tensors; i++) {
        const char *candidate = l->in->tensors[i]->name;
        if (strncmp(candidate, name, stem) == 0 && strcmp(candidate + stem, other) == 0)
            return l->in->tensors[i];
    }
    return NULL;
}

/* Engines cut the inputs of these over devices, the outputs of the others. */
static bool cuts_inputs(const char *name)
{
    return ends_with(name, "o_proj.weight") || ends_with(name, "down_proj.weight");
}

static bool in_layer(const qc_tensor_info *t)
{
    return strstr(t->name, "layers.") && t->n_dims == 2;
}

/* ---- rules ---- */

static bool same_scheme(const qc_tensor_info *a, const qc_tensor_info *b)
{
    if (a->dtype != QC_DT_GRID || b->dtype != QC_DT_GRID)
        return (a->dtype == QC_DT_GRID) == (b->dtype == QC_DT_GRID);
    return a->grid.bits == b->grid.bits && a->grid.symmetric == b->grid.symmetric &&
           a->grid.group_elems == b->grid.group_elems && a->act_bits == b->act_bits;
}

static int check_fused(const lint *l, qc_err *err)
{
    for (int64_t i = 0; i < l->in->n_tensors; i++)
        for (size_t f = 0; f < sizeof fused / sizeof fused[0]; f++) {
            const qc_tensor_info *first = l->in->tensors[i];
            if (!ends_with(first->name, fused[f][0]))
                continue;
            for (int k = 1; fused[f][k]; k++) {
                const qc_tensor_info *other = sibling(l, first->name, fused[f][0], fused[f][k]);
                if (other && !same_scheme(first, other))
                    QC_TRY(REFUSES(l, "fused", other->name, "another grid than %s, with which %s fuses it",
                                   first->name, l->engine));
            }
        }
    return QC_OK;
}

/* Largest number of devices out of 8, 4, 2, 1 that the matrix can be cut for; 0: not even one. */
static int tensor_parallel(const qc_tensor_info *t, int out_multiple, int in_multiple)
{
    int64_t out = qc_tensor_rows(t), in = qc_tensor_cols(t), group = t->grid.group_elems;
    bool channel = group >= in;
    for (int n = 8; n > 0; n /= 2) {
        int64_t o = cuts_inputs(t->name) ? out : out / n, i = cuts_inputs(t->name) ? in / n : in;
        if (o * (cuts_inputs(t->name) ? 1 : n) == out && i * (cuts_inputs(t->name) ? n : 1) == in &&
            o % out_multiple == 0 && i % in_multiple == 0 && (channel || i % group == 0))
            return n;
    }
    return 0;
}

static bool any_grid(const lint *l)
{
    for (int64_t i = 0; i < l->in->n_tensors; i++)
        if (l->in->tensors[i]->dtype == QC_DT_GRID)
            return true;
    return false;
}

/* The groups of its fast kernels, which vllm asks of GPTQ on every device. */
static bool usual_group(const qc_tensor_info *t)
{
    int64_t group = t->grid.group_elems;
    return group >= qc_tensor_cols(t) || group == 32 || group == 64 || group == 128;
}

static int check_kernels(const lint *l, qc_err *err)
{
    int parallel = 8;
    const char *worst = "", *odd = NULL;
    for (int64_t i = 0; i < l->in->n_tensors; i++) {
        const qc_tensor_info *t = l->in->tensors[i];
        if (t->dtype != QC_DT_GRID || !in_layer(t))
            continue;
        int n = tensor_parallel(t, t->act_bits ? 16 : 64, t->act_bits ? 16 : 128);
        if ((n == 0 || !usual_group(t)) && !odd)
            odd = t->name;
        if (n && n < parallel) {
            parallel = n;
            worst = t->name;
        }
    }
    if (odd)
        QC_TRY(NOTES(
            l, "kernel", odd,
            "the fast GPU kernels want outputs a multiple of 64, inputs of 128 and groups of 32, 64, 128 "
            "or a row; others run through slower ones, in float16 only, or on the CPU"));
    return NOTES(l, "tensor_parallel", worst, "over up to %d device%s with these kernels", parallel,
                 parallel > 1 ? "s" : "");
}

/* Matrices on a grid that a rule refuses. Seen with vllm 0.32: zero points of GPTQ are not read, so v1 and v2
 * of a symmetric grid are the same to it. */
static int check_vllm_matrix(const lint *l, const qc_tensor_info *t, qc_err *err)
{
    const qc_grid *g = &t->grid;
    if (is_format(l, "gptq") && (!g->symmetric || (g->bits != 4 && g->bits != 8)))
        return REFUSES(l, "grid", t->name, "vllm takes GPTQ with 4 or 8 bits and symmetric grids only");
    if (is_format(l, "gptq") && !usual_group(t))
        return REFUSES(l, "group", t->name,
                       "vllm takes GPTQ with groups of 32, 64, 128 or one scale per row only, not of %lld",
                       (long long)g->group_elems);
    if (is_format(l, "awq") && g->bits != 4)
        return REFUSES(l, "grid", t->name, "vllm takes AWQ with 4 bits only");
    if (!in_layer(t))
        return REFUSES(l, "table", t->name,
                       "vllm takes a quantized embedding or head only where the format says so");
    return QC_OK;
}

static bool weight_only_8(const lint *l)
{
    for (int64_t i = 0; i < l->in->n_tensors; i++)
        if (l->in->tensors[i]->dtype == QC_DT_GRID && l->in->tensors[i]->grid.bits == 8 &&
            !l->in->tensors[i]->act_bits)
            return true;
    return false;
}

static int check_vllm(const lint *l, qc_err *err)
{
    if (is_format(l, "gptq") && !any_grid(l))
        return REFUSES(l, "order", "config.json",
                       "vllm takes GPTQ with the columns in the order of their groups only (no desc_act)");
    for (int64_t i = 0; i < l->in->n_tensors; i++)
        if (l->in->tensors[i]->dtype == QC_DT_GRID)
            QC_TRY(check_vllm_matrix(l, l->in->tensors[i], err));
    QC_TRY(check_fused(l, err));
    if (is_format(l, "hf"))
        return QC_OK;
    if (weight_only_8(l))
        QC_TRY(NOTES(l, "kernel", "", "8 bits without quantized activations need a GPU in vllm"));
    return check_kernels(l, err);
}

/* Values of 16-bit float tensors that float16 can not hold, where an engine computes in it. */
static int check_f16_range(const lint *l, qc_err *err)
{
    const qc_source *src = l->in->values;
    for (int64_t i = 0; src && i < src->n_tensors; i++) {
        const qc_tensor_info *t = src->info(src, i);
        int64_t rows = qc_tensor_rows(t), cols = qc_tensor_cols(t);
        if (t->dtype != QC_DT_BF16 && t->dtype != QC_DT_F32)
            continue;
        float *row = qc_alloc((size_t)cols, sizeof *row);
        int rc = row ? QC_OK : qc_fail_nomem(err, t->name, (unsigned long long)cols * sizeof *row);
        bool over = false;
        for (int64_t r = 0; r < rows && rc == QC_OK && !over; r++) {
            rc = src->read_rows(src, i, r, 1, row, err);
            for (int64_t c = 0; c < cols && rc == QC_OK; c++)
                over = over || fabsf(row[c]) > QC_F16_MAX;
            src->release(src, i, r, 1);
        }
        qc_free(row);
        QC_TRY(rc);
        if (over)
            QC_TRY(REFUSES(l, "f16_range", t->name, "%s computes in float16 here, which ends at 65504",
                           l->engine));
    }
    return QC_OK;
}

/* Seen with transformers 5.24 and gptqmodel 7.7: `dynamic` of the config is not looked at when GPTQ is
 * loaded. */
static int check_one_scheme(const lint *l, qc_err *err)
{
    const qc_tensor_info *first = NULL;
    for (int64_t i = 0; i < l->in->n_tensors; i++) {
        const qc_tensor_info *t = l->in->tensors[i];
        if (t->dtype != QC_DT_GRID || !in_layer(t))
            continue;
        first = first ? first : t;
        if (t->grid.bits != first->grid.bits)
            return REFUSES(l, "mixed", t->name,
                           "transformers loads GPTQ with one number of bits only, %s has %d", first->name,
                           first->grid.bits);
    }
    return QC_OK;
}

static int check_transformers(const lint *l, qc_err *err)
{
    if (is_format(l, "gptq"))
        QC_TRY(check_one_scheme(l, err));
    for (int64_t i = 0; i < l->in->n_tensors; i++) {
        const qc_tensor_info *t = l->in->tensors[i];
        if (t->dtype == QC_DT_GRID && !in_layer(t) && !is_format(l, "hf"))
            QC_TRY(REFUSES(l, "table", t->name, "transformers replaces matrices of the layers only"));
    }
    return is_format(l, "awq") ? check_f16_range(l, err) : QC_OK;
}

/* ---- table ---- */

typedef struct engine {
    const char *name;
    const char *formats[6]; /* that it loads */
    int (*check)(const lint *l, qc_err *err);
    const char *instead;
} engine;

static const engine engines[] = {
    {"vllm",
     {"gptq", "awq", "compressed-tensors", "hf", "gguf"},
     check_vllm,
     "gptq, awq, compressed-tensors or hf"},
    {"transformers",
     {"gptq", "awq", "compressed-tensors", "hf", "gguf"},
     check_transformers,
     "gptq, awq, compressed-tensors or hf"},
    {"llama.cpp", {"gguf"}, NULL, "gguf"},
    {"onnxruntime", {"onnx"}, NULL, "onnx"},
};

int qc_engine_lint(const char *name, const qc_lint_input *input, qc_event_list *findings, qc_err *err)
{
    const engine *e = NULL;
    for (size_t i = 0; i < sizeof engines / sizeof engines[0]; i++)
        if (strcmp(engines[i].name, name) == 0)
            e = &engines[i];
    if (!e)
        return qc_fail(err, QC_E_USAGE, "'%.60s' is no engine that is known (%s)", name, qc_engine_names);
    lint l = {e->name, input, findings};
    for (int i = 0; e->formats[i]; i++)
        if (strcmp(e->formats[i], input->format) == 0)
            return e->check ? e->check(&l, err) : QC_OK;
    return qc_event_add(findings, QC_EVENT_FALLBACK, "format", input->path, 1, err,
                        "%s does not load %s; it loads %s", e->name, input->format, e->instead);
}
