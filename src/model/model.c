/* The account of tensors: every tensor of the source gets a role and a layer, every tensor that the config
 * demands is there with the right shape. */
#include "model.h"

#include "family.h"
#include "qc_alloc.h"
#include "qc_buf.h"
#include "qc_log.h"
#include "qc_math.h"

#include <stdio.h>
#include <string.h>

#define COMPARE_ROWS 64 /* rows of the two tables compared at a time */

static void slot_name(const qc_model_config *c, const char *const *names, int layer, qc_slot slot,
                      int64_t expert, char name[QC_NAME_BYTES])
{
    const char *prefix = c->family->layer_prefix, *text = names[slot], *star = strchr(text, '*');
    char plain[QC_NAME_BYTES];
    if (slot < QC_SLOT_FIRST_IN_LAYER)
        snprintf(plain, sizeof plain, "%s", text);
    else if (star)
        snprintf(plain, sizeof plain, "%s%d.%.*s%lld%s", prefix, layer, (int)(star - text), text,
                 (long long)expert, star + 1);
    else
        snprintf(plain, sizeof plain, "%s%d.%s", prefix, layer, text);
    qc_full_name(c->form, plain, name);
}

/* Cells per row: the slots that exist once, then those of each expert. */
static int64_t row_cells(const qc_model_config *config)
{
    return QC_SLOT_FIRST_IN_EXPERT + config->n_experts * (QC_N_SLOTS - QC_SLOT_FIRST_IN_EXPERT);
}

/* One row of slots outside the layers, then one per layer. */
static int64_t *slot_cell(const qc_model *model, int layer, qc_slot slot, int64_t expert)
{
    int64_t row = slot < QC_SLOT_FIRST_IN_LAYER ? 0 : layer + 1, col = slot;
    if (slot >= QC_SLOT_FIRST_IN_EXPERT)
        col += expert * (QC_N_SLOTS - QC_SLOT_FIRST_IN_EXPERT);
    return &model->tensors[row * row_cells(&model->config) + col];
}

int64_t qc_model_expert_tensor(const qc_model *model, int layer, qc_slot slot, int64_t expert)
{
    if (slot >= QC_SLOT_FIRST_IN_EXPERT && model->config.n_experts == 0)
        return -1;
    return *slot_cell(model, layer, slot, expert);
}

int64_t qc_model_tensor(const qc_model *model, int layer, qc_slot slot)
{
    return qc_model_expert_tensor(model, layer, slot, 0);
}

/* Keep a remark in the notes of the config (one line each) and log it. */
static int note(qc_model *model, qc_log_level level, const char *text, qc_err *err)
{
    char *old = model->config.notes;
    qc_log(level, "%s", text);
    char *all = old ? qc_asprintf("%s\n%s", old, text) : qc_strdup(text);
    if (!all)
        return qc_fail_nomem(err, "notes", strlen(text));
    qc_free(old);
    model->config.notes = all;
    return QC_OK;
}

static int check_dtype(const qc_model *model, const qc_tensor_info *info, bool matrix, qc_err *err)
{
    switch (info->dtype) {
    case QC_DT_F32:
    case QC_DT_F16:
    case QC_DT_BF16:
    case QC_DT_F64:
        return QC_OK;
    case QC_DT_GRID:
        if (matrix)
            return QC_OK;
        return qc_fail(err, QC_E_INPUT, "%s: tensor \"%s\" is on a grid, expected plain numbers",
                       model->src->path, info->name);
    default:
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: tensor \"%s\" holds %s, expected F32, F16, BF16 or F64%s",
                       model->src->path, info->name, qc_dtype_name(info->dtype),
                       matrix ? "; the checkpoint seems to be quantized already" : "");
    }
}

static int check_shape(const qc_model *model, const qc_tensor_info *info, const qc_slot_info *slot,
                       qc_err *err)
{
    char found[128], expected[128];
    int64_t want[2] = {qc_dim_elems(&model->config, slot->rows), qc_dim_elems(&model->config, slot->cols)};
    int n_dims = slot->rows == QC_DIM_NONE ? 1 : 2;
    const int64_t *shape = n_dims == 2 ? want : want + 1;
    if (info->n_dims == n_dims && memcmp(info->shape, shape, (size_t)n_dims * sizeof *shape) == 0)
        return check_dtype(model, info, n_dims == 2, err);
    qc_shape_text(info->shape, info->n_dims, found, sizeof found);
    qc_shape_text(shape, n_dims, expected, sizeof expected);
    return qc_fail(err, QC_E_INPUT, "%s: tensor \"%s\" has shape %s, expected %s by config.json",
                   model->src->path, info->name, found, expected);
}

/* *ret_equal = do two matrices of the same shape hold the same values? */
static int same_values(const qc_source *src, int64_t a, int64_t b, bool *ret_equal, qc_err *err)
{
    int64_t rows = qc_tensor_rows(src->info(src, a)), cols = qc_tensor_cols(src->info(src, a));
    float *x = qc_alloc(2 * COMPARE_ROWS * (size_t)cols, sizeof *x);
    int rc = x ? QC_OK
               : qc_fail_nomem(err, "comparing the head with the embedding",
                               2 * COMPARE_ROWS * (unsigned long long)cols * sizeof *x);
    bool equal = true;
    for (int64_t row = 0; row < rows && equal && rc == QC_OK; row += COMPARE_ROWS) {
        int64_t n = qc_min_i64(COMPARE_ROWS, rows - row);
        rc = src->read_rows(src, a, row, n, x, err);
        if (rc == QC_OK)
            rc = src->read_rows(src, b, row, n, x + n * cols, err);
        equal = rc == QC_OK && memcmp(x, x + n * cols, (size_t)(n * cols) * sizeof *x) == 0;
        src->release(src, a, row, n);
        src->release(src, b, row, n);
    }
    qc_free(x);
    if (rc == QC_OK)
        *ret_equal = equal;
    return rc;
}

/* A head beside a tied table: an equal one is redundant, a different one wins with a warning. A head without
 * a table becomes the table. */
static int settle_tie(qc_model *model, qc_err *err)
{
    const qc_source *src = model->src;
    char text[QC_ERR_MSG_BYTES], table_name[QC_NAME_BYTES], head_name[QC_NAME_BYTES];
    slot_name(&model->config, model->config.family->names, 0, QC_SLOT_EMBEDDING, 0, table_name);
    slot_name(&model->config, model->config.family->names, 0, QC_SLOT_HEAD, 0, head_name);
    int64_t table = src->find(src, table_name), head = src->find(src, head_name);
    bool equal = false;
    if (!model->config.tied || head < 0 || head == table) /* a packed file knows the head as a second name */
        return QC_OK;
    if (table < 0) {
        *slot_cell(model, 0, QC_SLOT_EMBEDDING, 0) = head;
        model->places[head] = (qc_tensor_place){QC_ROLE_EMBEDDING, -1, -1};
        snprintf(text, sizeof text, "%s: \"%s\" is missing, the tied \"%s\" stands for it", src->path,
                 table_name, head_name);
        return note(model, QC_LOG_WARN, text, err);
    }
    QC_TRY(check_shape(model, src->info(src, table), qc_slot_of(QC_SLOT_EMBEDDING), err));
    QC_TRY(check_shape(model, src->info(src, head), qc_slot_of(QC_SLOT_HEAD), err));
    QC_TRY(same_values(src, table, head, &equal, err));
    if (equal) {
        model->places[head] = (qc_tensor_place){QC_ROLE_TIED, -1, -1};
        return QC_OK;
    }
    model->config.tied = false;
    snprintf(text, sizeof text,
             "%s: tie_word_embeddings is true but \"%s\" differs from \"%s\": treated as not tied", src->path,
             head_name, table_name);
    return note(model, QC_LOG_WARN, text, err);
}

typedef struct lost_tensors {
    int64_t n;
    char first[QC_NAME_BYTES];
    bool expert; /* the first one is an expert's */
} lost_tensors;

/* Find and check the tensor of one slot, of one expert if it is theirs. */
static int place_tensor(qc_model *model, int layer, qc_slot slot, int64_t expert, lost_tensors *lost,
                        qc_err *err)
{
    char name[QC_NAME_BYTES], other[QC_NAME_BYTES];
    const qc_family *f = model->config.family;
    int64_t *cell = slot_cell(model, layer, slot, expert);
    bool is_expert = slot >= QC_SLOT_FIRST_IN_EXPERT;
    slot_name(&model->config, f->names, layer, slot, expert, name);
    if (*cell < 0)
        *cell = model->src->find(model->src, name);
    if (*cell < 0 && f->other_names && f->other_names[slot]) {
        slot_name(&model->config, f->other_names, layer, slot, expert, other);
        *cell = model->src->find(model->src, other);
    }
    if (*cell < 0) {
        if (lost->n++ == 0) {
            memcpy(lost->first, name, sizeof name);
            lost->expert = is_expert;
        }
        return QC_OK;
    }
    model->places[*cell] = (qc_tensor_place){
        qc_slot_of(slot)->role, slot < QC_SLOT_FIRST_IN_LAYER ? -1 : layer, is_expert ? (int)expert : -1};
    return check_shape(model, model->src->info(model->src, *cell), qc_slot_of(slot), err);
}

static int place_slot(qc_model *model, int layer, qc_slot slot, lost_tensors *lost, qc_err *err)
{
    int64_t n = slot < QC_SLOT_FIRST_IN_EXPERT ? 1 : model->config.n_experts;
    if (!qc_slot_present(&model->config, layer, slot))
        return QC_OK;
    for (int64_t expert = 0; expert < n; expert++)
        QC_TRY(place_tensor(model, layer, slot, expert, lost, err));
    return QC_OK;
}

/* Does a name begin with a, and go on with b? */
static bool begins_with(const char *name, const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    return strncmp(name, a, n) == 0 && strncmp(name + n, b, m) == 0;
}

static int place_all(qc_model *model, qc_err *err)
{
    lost_tensors lost = {0};
    for (int slot = 0; slot < QC_SLOT_FIRST_IN_LAYER; slot++)
        QC_TRY(place_slot(model, 0, (qc_slot)slot, &lost, err));
    for (int layer = 0; layer < model->config.n_layers; layer++)
        for (int slot = QC_SLOT_FIRST_IN_LAYER; slot < QC_N_SLOTS; slot++)
            QC_TRY(place_slot(model, layer, (qc_slot)slot, &lost, err));
    if (lost.n == 0)
        return QC_OK;
    const qc_family *f = model->config.family;
    char more[64] = "", why[96] = "";
    if (lost.n > 1)
        snprintf(more, sizeof more, " and %lld more tensors are", (long long)lost.n - 1);
    if (begins_with(lost.first, model->config.form->head, f->names[QC_SLOT_HEAD]))
        snprintf(why, sizeof why, " although the head is not tied (tie_word_embeddings)");
    if (lost.expert)
        snprintf(why, sizeof why, ", but %s in config.json is %lld", f->experts.count_key,
                 (long long)model->config.n_experts);
    return qc_fail(err, QC_E_INPUT, "%s: tensor \"%s\"%s missing%s", model->src->path, lost.first,
                   lost.n > 1 ? more : " is", why);
}

static bool ends_with(const char *name, const char *const *endings)
{
    size_t n = strlen(name);
    for (; *endings; endings++) {
        size_t m = strlen(*endings);
        if (n >= m && strcmp(name + n - m, *endings) == 0)
            return true;
    }
    return false;
}

/* Tensors that have no slot, all for one reason. */
typedef struct left_out {
    int64_t n;
    const char *first; /* the first one's name */
} left_out;

static int note_left_out(qc_model *model, const left_out *out, qc_log_level level, const char *what,
                         qc_err *err)
{
    char text[QC_ERR_MSG_BYTES];
    if (out->n == 0)
        return QC_OK;
    snprintf(text, sizeof text, "%s: %lld %s dropped, \"%s\"%s", model->src->path, (long long)out->n, what,
             out->first, out->n > 1 ? " and the like" : "");
    return note(model, level, text, err);
}

/* Does a tensor of a model with several parts belong to another one than the text model? */
static bool is_outside(const qc_model_config *c, const char *name)
{
    return c->wrapped && !begins_with(name, c->form->body, "") &&
           !begins_with(name, c->form->head, "lm_head.");
}

/* Tensors without a slot: computed buffers and those of other parts are dropped, anything else is refused. */
static int settle_rest(qc_model *model, qc_err *err)
{
    static const char *const buffers[] = {"rotary_emb.inv_freq", "rotary_emb.cos_cached",
                                          "rotary_emb.sin_cached", "attn.masked_bias", NULL};
    const qc_source *src = model->src;
    left_out computed = {0}, outside = {0};
    for (int64_t t = 0; t < src->n_tensors; t++) {
        const char *name = src->info(src, t)->name;
        if (model->places[t].role != QC_ROLE_UNKNOWN)
            continue;
        bool other = is_outside(&model->config, name);
        if (!other && !ends_with(name, buffers))
            return qc_fail(err, QC_E_INPUT,
                           "%s: tensor \"%s\" is no part of a %s model with this config.json", src->path,
                           name, model->config.family->model_type);
        left_out *out = other ? &outside : &computed;
        model->places[t].role = other ? QC_ROLE_OUTSIDE : QC_ROLE_BUFFER;
        out->first = out->n++ ? out->first : name;
    }
    QC_TRY(note_left_out(model, &computed, QC_LOG_INFO, "computed buffer(s)", err));
    return note_left_out(model, &outside, QC_LOG_WARN, "tensor(s) of other parts than the text model", err);
}

static int account(qc_model *model, qc_err *err)
{
    const qc_source *src = model->src;
    /* each layer has several tensors: a hostile layer count is refused before it costs memory */
    if (model->config.n_layers > src->n_tensors)
        return qc_fail(err, QC_E_INPUT, "%s: num_hidden_layers is %lld but there are only %lld tensors",
                       src->path, (long long)model->config.n_layers, (long long)src->n_tensors);
    int64_t n_expert_tensors = 0;
    for (int64_t i = 0; i < model->config.n_layers; i++)
        if (model->config.layer_sparse[i])
            n_expert_tensors += model->config.n_experts * (QC_N_SLOTS - QC_SLOT_FIRST_IN_EXPERT);
    if (n_expert_tensors > src->n_tensors)
        return qc_fail(err, QC_E_INPUT,
                       "%s: %s is %lld, which asks for %lld tensors of experts, but there are only %lld",
                       src->path, model->config.family->experts.count_key, (long long)model->config.n_experts,
                       (long long)n_expert_tensors, (long long)src->n_tensors);
    size_t n_cells = (size_t)((model->config.n_layers + 1) * row_cells(&model->config));
    model->places = qc_alloc((size_t)src->n_tensors, sizeof *model->places);
    model->tensors = qc_alloc(n_cells, sizeof *model->tensors);
    if (!model->places || !model->tensors)
        return qc_fail_nomem(err, "the account of tensors", n_cells * sizeof *model->tensors);
    for (int64_t t = 0; t < src->n_tensors; t++)
        model->places[t] = (qc_tensor_place){QC_ROLE_UNKNOWN, -1, -1};
    for (size_t i = 0; i < n_cells; i++)
        model->tensors[i] = -1;
    QC_TRY(settle_tie(model, err));
    QC_TRY(place_all(model, err));
    QC_TRY(settle_rest(model, err));
    if (model->config.tied)
        *slot_cell(model, 0, QC_SLOT_HEAD, 0) = *slot_cell(model, 0, QC_SLOT_EMBEDDING, 0);
    return QC_OK;
}

int qc_model_open(const qc_source *src, qc_model *ret, qc_err *err)
{
    qc_model model = {.src = src};
    QC_TRY(qc_model_config_load(src, &model.config, err));
    int rc = account(&model, err);
    if (rc == QC_OK)
        *ret = model;
    else
        qc_model_close(&model);
    return rc;
}

void qc_model_close(qc_model *model)
{
    qc_model_config_clear(&model->config);
    qc_free(model->places);
    qc_free(model->tensors);
    *model = (qc_model){0};
}
