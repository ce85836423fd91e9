#include "golden.h"

#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_test.h"

#include <math.h>

static const qc_st_tensor *find(const qc_st_file *file, const char *name)
{
    for (int64_t i = 0; i < file->n_tensors; i++)
        if (strcmp(file->tensors[i].info.name, name) == 0)
            return &file->tensors[i];
    ck_abort_msg("golden file lacks %s", name);
    return NULL;
}

float *golden_floats(const qc_st_file *file, const char *name, int64_t *ret_n_elems)
{
    const qc_st_tensor *t = find(file, name);
    *ret_n_elems = qc_tensor_n_elems(&t->info);
    float *x = qc_alloc((size_t)*ret_n_elems, sizeof *x);
    ck_assert_int_eq(qc_dense_to_f32(t->info.dtype, file->map.data + t->offset, *ret_n_elems, x, NULL),
                     QC_OK);
    return x;
}

int32_t *golden_ints(const qc_st_file *file, const char *name, int64_t *ret_n_elems)
{
    const qc_st_tensor *t = find(file, name);
    ck_assert_int_eq(t->info.dtype, QC_DT_I32);
    *ret_n_elems = qc_tensor_n_elems(&t->info);
    int32_t *x = qc_alloc((size_t)*ret_n_elems, sizeof *x);
    memcpy(x, file->map.data + t->offset, (size_t)*ret_n_elems * sizeof *x);
    return x;
}

#define OK(expr)                                                                                             \
    do {                                                                                                     \
        int rc_ = (expr);                                                                                    \
        ck_assert_msg(rc_ == QC_OK, "%s: %s", #expr, err.msg);                                               \
    } while (0)

/* What the product does inside `score`. */
static void cap(float *x, int64_t n, float softcap)
{
    for (int64_t i = 0; i < n && softcap > 0; i++)
        x[i] = softcap * tanhf(x[i] / softcap);
}

static void run_head(const qc_model *model, qc_backend *be, const float *x, run_result *r, int64_t seq,
                     int64_t slice_rows)
{
    qc_err err = {0};
    float *host = qc_alloc((size_t)(r->n_tokens * slice_rows), sizeof *host);
    for (int64_t v = 0; v < r->vocab; v += slice_rows) {
        int64_t n = qc_min_i64(slice_rows, r->vocab - v);
        qc_weight *w = NULL;
        OK(qc_model_head_slice(model, be, v, n, &w, &err));
        float *y = be->alloc(be, r->n_tokens * n, &err);
        OK(be->linear(be, y, n, x, r->hidden, w, NULL, r->n_tokens, false, &err));
        OK(be->download(be, host, y, r->n_tokens * n, &err));
        cap(host, r->n_tokens * n, model->config.final_softcap);
        for (int64_t t = 0; t < r->n_tokens; t++)
            memcpy(r->logits + (seq * r->n_tokens + t) * r->vocab + v, host + t * n,
                   (size_t)n * sizeof *host);
        be->free(be, y);
        be->weight_free(be, w);
    }
    qc_free(host);
}

run_result run_model(const qc_model *model, qc_backend *be, const int32_t *ids, int64_t n_seqs,
                     int64_t n_tokens, int64_t slice_rows)
{
    const qc_model_config *c = &model->config;
    qc_err err = {0};
    run_result r = {.n_seqs = n_seqs,
                    .n_tokens = n_tokens,
                    .hidden = c->hidden,
                    .vocab = c->vocab,
                    .n_layers = c->n_layers};
    int64_t n = n_tokens * c->hidden;
    r.logits = qc_alloc((size_t)(n_seqs * n_tokens * c->vocab), sizeof *r.logits);
    r.states = qc_alloc((size_t)((c->n_layers + 1) * n_seqs * n), sizeof *r.states);
    qc_workspace *ws = NULL;
    OK(qc_workspace_new(model, be, n_tokens, &ws, &err));
    float *x = be->alloc(be, n, &err);
    for (int64_t s = 0; s < n_seqs; s++) {
        float *state = r.states + s * n;
        OK(qc_model_embed(model, ids + s * n_tokens, n_tokens, state, &err));
        OK(be->upload(be, x, state, n, &err));
        for (int i = 0; i < (int)c->n_layers; i++) {
            qc_layer *layer = NULL;
            OK(qc_layer_load(model, be, i, &layer, &err));
            OK(qc_layer_forward(layer, ws, x, n_tokens, &err));
            qc_layer_free(layer);
            if (i == c->n_layers - 1)
                OK(qc_model_final_norm(model, be, x, x, n_tokens, &err));
            OK(be->download(be, state + (i + 1) * n_seqs * n, x, n, &err));
        }
        run_head(model, be, x, &r, s, slice_rows);
    }
    be->free(be, x);
    qc_workspace_free(ws);
    return r;
}

void run_free(run_result *r)
{
    qc_free(r->logits);
    qc_free(r->states);
}

double run_nll(const run_result *r, const int32_t *ids, int64_t s)
{
    double total = 0;
    for (int64_t t = 0; t + 1 < r->n_tokens; t++) {
        const float *row = r->logits + (s * r->n_tokens + t) * r->vocab;
        double top = row[0], sum = 0;
        for (int64_t v = 1; v < r->vocab; v++)
            top = row[v] > top ? row[v]
                               : top; /* not fmax: gcc 12 for aarch64 dies on the double maximum of floats */
        for (int64_t v = 0; v < r->vocab; v++)
            sum += exp(row[v] - top);
        total += top + log(sum) - row[ids[s * r->n_tokens + t + 1]];
    }
    return total;
}

double max_abs_diff(const float *a, const float *b, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!isfinite(d))
            return INFINITY;
        worst = fmax(worst, d);
    }
    return worst;
}
