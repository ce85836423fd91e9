#include "layer_record.h"

#include "qc_alloc.h"
#include "qc_json.h"

#include <string.h>

/* One table serves both directions. */
typedef enum { FIELD_DOUBLE, FIELD_INT64, FIELD_INT, FIELD_BOOL } field_type;

typedef struct field {
    const char *key;
    field_type type;
    size_t offset;
} field;

#define M(m) offsetof(qc_matrix_record, m)
static const field matrix_fields[] = {{"damp", FIELD_DOUBLE, M(input.damp)},
                                      {"damp_raises", FIELD_INT, M(input.n_raises)},
                                      {"dead_columns", FIELD_INT64, M(input.n_dead)},
                                      {"failed", FIELD_BOOL, M(input.failed)},
                                      {"mean_diag", FIELD_DOUBLE, M(input.mean_diag)},
                                      {"error", FIELD_DOUBLE, M(result.error)},
                                      {"error_rtn", FIELD_DOUBLE, M(result.error_rtn)},
                                      {"error_norm", FIELD_DOUBLE, M(norm)},
                                      {"rtn_rows", FIELD_INT64, M(result.n_rtn_rows)},
                                      {"all_rtn", FIELD_BOOL, M(result.all_rtn)},
                                      {"sq_error", FIELD_DOUBLE, M(stats.sq_error)},
                                      {"sq_weight", FIELD_DOUBLE, M(stats.sq_weight)},
                                      {"clipped", FIELD_INT64, M(stats.n_clipped)},
                                      {"zero_groups", FIELD_INT64, M(stats.n_zero_groups)},
                                      {"small_scales", FIELD_INT64, M(stats.n_small_scale)},
                                      {"large_scales", FIELD_INT64, M(stats.n_large_scale)},
                                      {"tokens", FIELD_INT64, M(tokens)},
                                      {"seconds", FIELD_DOUBLE, M(seconds)},
                                      {0}};
#undef M

#define T(m) offsetof(qc_layer_times, m)
static const field time_fields[] = {
    {"forward", FIELD_DOUBLE, T(forward)}, {"hessian", FIELD_DOUBLE, T(hessian)},
    {"factor", FIELD_DOUBLE, T(factor)},   {"solve", FIELD_DOUBLE, T(solve)},
    {"fold", FIELD_DOUBLE, T(fold)},       {"pack", FIELD_DOUBLE, T(pack)},
    {"io", FIELD_DOUBLE, T(io)},           {0}};
#undef T

#define F(m) offsetof(qc_fold_figures, m)
static const field fold_fields[] = {{"loss", FIELD_DOUBLE, F(loss)},
                                    {"loss_identity", FIELD_DOUBLE, F(loss_identity)},
                                    {"limited", FIELD_INT64, F(n_limited)},
                                    {"seconds", FIELD_DOUBLE, F(seconds)},
                                    {0}};
#undef F

static const char *const stages[] = {"qkv", "o", "gate_up", "down", NULL};
static const char *const methods[] = {"rtn", "gptq", NULL};
static const char *const orders[] = {"none", "static", "min-pivot", NULL};

int qc_layer_record_add(qc_layer_record *record, const qc_matrix_record *matrix, qc_err *err)
{
    size_t old = (size_t)record->n_matrices * sizeof *matrix;
    qc_matrix_record *m = qc_realloc(record->matrices, old, old + sizeof *matrix);
    if (!m)
        return qc_fail_nomem(err, "record of a layer", old + sizeof *matrix);
    record->matrices = m;
    m += record->n_matrices;
    *m = *matrix;
    if (!(m->name = qc_strdup(matrix->name)))
        return qc_fail_nomem(err, "record of a layer", strlen(matrix->name) + 1);
    record->n_matrices++;
    return QC_OK;
}

int qc_layer_record_add_fold(qc_layer_record *record, const qc_fold_figures *fold, qc_err *err)
{
    if (record->n_folds == QC_RECORD_FOLDS)
        return qc_fail(err, QC_E_USAGE, "record of a layer: more than %d scaled inputs", QC_RECORD_FOLDS);
    record->folds[record->n_folds++] = *fold;
    return QC_OK;
}

void qc_layer_record_clear(qc_layer_record *record)
{
    for (int i = 0; i < record->n_matrices; i++)
        qc_free(record->matrices[i].name);
    qc_free(record->matrices);
    qc_event_list_clear(&record->events);
    *record = (qc_layer_record){0};
}

/* ---- to text ---- */

static void put_fields(cJSON *object, const field *fields, const void *base)
{
    for (const field *f = fields; f->key; f++) {
        const char *at = (const char *)base + f->offset;
        if (f->type == FIELD_BOOL)
            cJSON_AddBoolToObject(object, f->key, *(const bool *)at);
        else
            cJSON_AddNumberToObject(object, f->key,
                                    f->type == FIELD_DOUBLE  ? *(const double *)at
                                    : f->type == FIELD_INT64 ? (double)*(const int64_t *)at
                                                             : *(const int *)at);
    }
}

static void put_event(cJSON *list, const qc_event *e)
{
    cJSON *o = qc_json_add_item(list, cJSON_CreateObject());
    cJSON_AddStringToObject(o, "kind", e->kind);
    cJSON_AddStringToObject(o, "subject", e->subject);
    cJSON_AddStringToObject(o, "detail", e->detail);
    cJSON_AddBoolToObject(o, "fallback", e->level == QC_EVENT_FALLBACK);
    cJSON_AddNumberToObject(o, "count", (double)e->count);
}

char *qc_layer_record_print(const qc_layer_record *record)
{
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddNumberToObject(doc, "layer", record->layer);
    cJSON *matrices = cJSON_AddArrayToObject(doc, "matrices");
    for (int i = 0; i < record->n_matrices; i++) {
        const qc_matrix_record *m = &record->matrices[i];
        cJSON *o = qc_json_add_item(matrices, cJSON_CreateObject());
        cJSON_AddStringToObject(o, "name", m->name);
        cJSON_AddStringToObject(o, "method", m->method);
        if (m->order)
            cJSON_AddStringToObject(o, "order", m->order);
        put_fields(o, matrix_fields, m);
    }
    cJSON *folds = cJSON_AddArrayToObject(doc, "folds");
    for (int i = 0; i < record->n_folds; i++) {
        cJSON *o = qc_json_add_item(folds, cJSON_CreateObject());
        cJSON_AddStringToObject(o, "stage", record->folds[i].stage);
        cJSON_AddStringToObject(o, "choice", record->folds[i].choice);
        put_fields(o, fold_fields, &record->folds[i]);
    }
    cJSON *events = cJSON_AddArrayToObject(doc, "events");
    for (int64_t i = 0; i < record->events.n_events; i++)
        put_event(events, &record->events.events[i]);
    put_fields(cJSON_AddObjectToObject(doc, "seconds"), time_fields, &record->times);
    doc = qc_json_watched(doc);
    char *text = doc ? qc_json_print(doc) : NULL;
    cJSON_Delete(doc);
    return text;
}

/* ---- from text ---- */

static int bad(qc_err *err, const char *key)
{
    return qc_fail(err, QC_E_INPUT, "record of a layer: %s is missing or of another kind than expected", key);
}

static int get_fields(const cJSON *object, const field *fields, void *base, qc_err *err)
{
    for (const field *f = fields; f->key; f++) {
        const cJSON *item = qc_json_get(object, f->key);
        char *at = (char *)base + f->offset;
        int64_t n = 0;
        bool ok = f->type == FIELD_BOOL     ? cJSON_IsBool(item)
                  : f->type == FIELD_DOUBLE ? cJSON_IsNumber(item)
                                            : qc_json_int(item, &n);
        if (!ok)
            return bad(err, f->key);
        if (f->type == FIELD_BOOL)
            *(bool *)at = cJSON_IsTrue(item);
        else if (f->type == FIELD_DOUBLE)
            *(double *)at = item->valuedouble;
        else if (f->type == FIELD_INT64)
            *(int64_t *)at = n;
        else
            *(int *)at = (int)n;
    }
    return QC_OK;
}

/* The entry of a list of words that an item spells; NULL if none. */
static const char *word_of(const cJSON *item, const char *const *words)
{
    while (cJSON_IsString(item) && *words && strcmp(*words, item->valuestring) != 0)
        words++;
    return cJSON_IsString(item) ? *words : NULL;
}

static int get_matrix(const cJSON *o, qc_layer_record *ret, qc_err *err)
{
    const cJSON *name = qc_json_get(o, "name"), *order = qc_json_get(o, "order");
    qc_matrix_record m = {.method = word_of(qc_json_get(o, "method"), methods)};
    if (!cJSON_IsString(name))
        return bad(err, "name");
    if (!m.method)
        return bad(err, "method");
    if (order && !(m.order = word_of(order, orders)))
        return bad(err, "order");
    QC_TRY(get_fields(o, matrix_fields, &m, err));
    m.name = name->valuestring;
    return qc_layer_record_add(ret, &m, err);
}

static int get_fold(const cJSON *o, qc_layer_record *ret, qc_err *err)
{
    const cJSON *choice = qc_json_get(o, "choice");
    qc_fold_figures fold = {.stage = word_of(qc_json_get(o, "stage"), stages)};
    if (!fold.stage)
        return bad(err, "stage");
    if (!cJSON_IsString(choice) || strlen(choice->valuestring) >= sizeof fold.choice)
        return bad(err, "choice");
    memcpy(fold.choice, choice->valuestring, strlen(choice->valuestring));
    QC_TRY(get_fields(o, fold_fields, &fold, err));
    return qc_layer_record_add_fold(ret, &fold, err);
}

static int get_event(const cJSON *o, qc_layer_record *ret, qc_err *err)
{
    const cJSON *kind = qc_json_get(o, "kind"), *subject = qc_json_get(o, "subject"),
                *detail = qc_json_get(o, "detail");
    int64_t count;
    if (!cJSON_IsString(kind) || !cJSON_IsString(subject) || !cJSON_IsString(detail) ||
        !qc_json_int(qc_json_get(o, "count"), &count))
        return bad(err, "events");
    return qc_event_add(&ret->events,
                        cJSON_IsTrue(qc_json_get(o, "fallback")) ? QC_EVENT_FALLBACK : QC_EVENT_NOTE,
                        kind->valuestring, subject->valuestring, count, err, "%s", detail->valuestring);
}

static int get_record(const cJSON *doc, qc_layer_record *ret, qc_err *err)
{
    int64_t layer;
    const cJSON *item;
    if (!qc_json_int(qc_json_get(doc, "layer"), &layer))
        return bad(err, "layer");
    ret->layer = (int)layer;
    cJSON_ArrayForEach(item, qc_json_get(doc, "matrices")) QC_TRY(get_matrix(item, ret, err));
    cJSON_ArrayForEach(item, qc_json_get(doc, "folds")) QC_TRY(get_fold(item, ret, err));
    cJSON_ArrayForEach(item, qc_json_get(doc, "events")) QC_TRY(get_event(item, ret, err));
    return get_fields(qc_json_get(doc, "seconds"), time_fields, &ret->times, err);
}

int qc_layer_record_parse(const char *text, qc_layer_record *ret, qc_err *err)
{
    cJSON *doc;
    *ret = (qc_layer_record){0};
    QC_TRY(qc_json_parse(text, strlen(text), "record of a layer", true, &doc, err));
    int rc = get_record(doc, ret, err);
    cJSON_Delete(doc);
    if (rc < 0)
        qc_layer_record_clear(ret);
    return rc;
}
