/* What differs from layer to layer: which ones attend through the sliding window, which ones rotate queries
 * and keys, which ones have experts. */
#include "config_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <string.h>

#define MAX_EXPERTS 65536

/* layer_types, if given, into layer_slides; *ret_given says whether it was. */
static int read_layer_types(qc_config_reader *r, bool *ret_given)
{
    const cJSON *list = qc_json_get(r->json, "layer_types");
    int64_t i = 0;
    *ret_given = list != NULL;
    if (!list)
        return QC_OK;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != r->out->n_layers)
        return qc_fail(r->err, QC_E_INPUT, "%s: \"layer_types\" is not a list of %lld names", r->file,
                       (long long)r->out->n_layers);
    for (const cJSON *item = list->child; item; item = item->next, i++) {
        const char *name = cJSON_IsString(item) ? item->valuestring : "";
        r->out->layer_slides[i] = strcmp(name, "sliding_attention") == 0;
        if (!r->out->layer_slides[i] && strcmp(name, "full_attention") != 0)
            return qc_fail(r->err, QC_E_UNSUPPORTED,
                           "%s: layer type \"%s\" of layer %lld is not supported; expected full_attention or "
                           "sliding_attention",
                           r->file, name, (long long)i);
    }
    return QC_OK;
}

/* Does layer i slide by the family's own rule? */
static bool slides_by_rule(const qc_config_reader *r, int64_t max_window_layers, int64_t pattern, int64_t i)
{
    if (r->out->sliding_window == 0)
        return false;
    switch (r->family->window) {
    case QC_WINDOW_UPPER_LAYERS:
        return i >= max_window_layers;
    case QC_WINDOW_PATTERN:
        return (i + 1) % pattern != 0;
    case QC_WINDOW_NO_ROPE:
        return !r->out->layer_rotates[i];
    default:
        return true;
    }
}

/* The class of a family without a choice of layers reads neither use_sliding_window nor layer_types: they are
 * accepted where they say what happens anyway. */
static int read_window(qc_config_reader *r)
{
    const qc_class_defaults *d = &r->family->defaults;
    qc_model_config *c = r->out;
    int64_t window = 0, max_window_layers = 0, pattern = 0;
    bool use = false, listed = false;
    bool switched = r->family->window == QC_WINDOW_BY_SWITCH,
         optional = switched || r->family->window == QC_WINDOW_UPPER_LAYERS ||
                    r->family->window == QC_WINDOW_NO_ROPE,
         chosen = (optional && !switched) || r->family->window == QC_WINDOW_PATTERN;
    QC_TRY(qc_config_int(r, r->json, "sliding_window",
                         qc_config_has(r, "sliding_window") ? 0 : d->sliding_window, 1, INT32_MAX, &window));
    QC_TRY(qc_config_int(r, r->json, "max_window_layers", d->max_window_layers, 0, INT32_MAX,
                         &max_window_layers));
    QC_TRY(qc_config_int(r, r->json, "sliding_window_pattern", d->window_pattern, 1, INT32_MAX, &pattern));
    QC_TRY(qc_config_bool(r, r->json, "use_sliding_window", !optional && window > 0, &use));
    if (r->family->window == QC_WINDOW_NEVER && (window > 0 || use))
        return qc_fail(r->err, QC_E_UNSUPPORTED,
                       "%s: a sliding window is not supported for %s; expected sliding_window null", r->file,
                       r->family->model_type);
    if (!optional && (use != (window > 0) || (window > 0 && qc_json_get(r->json, "max_window_layers"))))
        return qc_fail(r->err, QC_E_UNSUPPORTED,
                       "%s: use_sliding_window and max_window_layers are not supported for %s: layers slide "
                       "if sliding_window is set",
                       r->file, r->family->model_type);
    if (window > 0 && !optional && !qc_config_has(r, "sliding_window"))
        QC_TRY(qc_config_note(r, QC_LOG_WARN, "%s: sliding_window is absent, class default %lld", r->file,
                              (long long)window));
    c->sliding_window = use ? window : 0;
    c->layer_slides = qc_calloc((size_t)c->n_layers, sizeof *c->layer_slides);
    if (!c->layer_slides)
        return qc_fail_nomem(r->err, "layer types", (unsigned long long)c->n_layers);
    QC_TRY(read_layer_types(r, &listed));
    for (int64_t i = 0; i < c->n_layers; i++) {
        bool rule = slides_by_rule(r, max_window_layers, pattern, i);
        if (!listed)
            c->layer_slides[i] = rule;
        else if (c->layer_slides[i] ? c->sliding_window == 0 : rule && !chosen)
            return qc_fail(r->err, QC_E_INPUT,
                           "%s: layer_types says that layer %lld %s, but the sliding window is %s", r->file,
                           (long long)i, c->layer_slides[i] ? "slides" : "does not slide",
                           c->sliding_window ? "set" : "off");
    }
    return QC_OK;
}

/* no_rope_layers has a 1 for each layer that rotates, whatever its name says; without it all but every
 * interval-th do. */
static int read_rotation(qc_config_reader *r)
{
    qc_model_config *c = r->out;
    bool reads = qc_family_reads(r->family, "no_rope_layers");
    const cJSON *list = reads ? qc_json_get(r->json, "no_rope_layers") : NULL, *item = NULL;
    int64_t interval = 0;
    c->layer_rotates = qc_calloc((size_t)c->n_layers, sizeof *c->layer_rotates);
    if (!c->layer_rotates)
        return qc_fail_nomem(r->err, "layer types", (unsigned long long)c->n_layers);
    if (reads)
        QC_TRY(qc_config_int(r, r->json, "no_rope_layer_interval", r->family->defaults.no_rope_interval, 1,
                             INT32_MAX, &interval));
    if (list && (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != c->n_layers))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"no_rope_layers\" is not a list of %lld numbers", r->file,
                       (long long)c->n_layers);
    if (list)
        item = list->child;
    for (int64_t i = 0; i < c->n_layers; i++) {
        c->layer_rotates[i] = item ? item->valuedouble != 0 : interval == 0 || (i + 1) % interval != 0;
        if (item && (!cJSON_IsNumber(item) || (item->valuedouble != 0 && item->valuedouble != 1)))
            return qc_fail(r->err, QC_E_INPUT, "%s: entry %lld of \"no_rope_layers\" is not 0 or 1", r->file,
                           (long long)i);
        item = item ? item->next : NULL;
    }
    return QC_OK;
}

/* All layers, or every decoder_sparse_step-th but those of mlp_only_layers. */
static int read_sparse_layers(qc_config_reader *r)
{
    qc_model_config *c = r->out;
    int64_t step = 1, layer = 0;
    const cJSON *dense = r->family->experts.some_layers ? qc_json_get(r->json, "mlp_only_layers") : NULL;
    if (r->family->experts.some_layers)
        QC_TRY(qc_config_int(r, r->json, "decoder_sparse_step", 1, 1, INT32_MAX, &step));
    for (int64_t i = 0; i < c->n_layers; i++)
        c->layer_sparse[i] = (i + 1) % step == 0;
    if (dense && !cJSON_IsArray(dense))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"mlp_only_layers\" is not a list of layers", r->file);
    for (const cJSON *item = dense ? dense->child : NULL; item; item = item->next) {
        if (!qc_json_int(item, &layer) || layer < 0 || layer >= c->n_layers)
            return qc_fail(r->err, QC_E_INPUT, "%s: \"mlp_only_layers\" names a layer that is not 0 to %lld",
                           r->file, (long long)c->n_layers - 1);
        c->layer_sparse[layer] = false;
    }
    return QC_OK;
}

/* Width and number of the experts, and which layers have them. */
static int read_experts(qc_config_reader *r)
{
    const qc_expert_rule *e = &r->family->experts;
    qc_model_config *c = r->out;
    c->layer_sparse = qc_calloc((size_t)c->n_layers, sizeof *c->layer_sparse);
    if (!c->layer_sparse)
        return qc_fail_nomem(r->err, "layer types", (unsigned long long)c->n_layers);
    if (!e->count_key)
        return QC_OK;
    int64_t newer = -1;
    QC_TRY(qc_config_int(r, r->json, e->count_key, -1, 0, MAX_EXPERTS, &c->n_experts));
    if (e->new_count_key)
        QC_TRY(qc_config_int(r, r->json, e->new_count_key, -1, 0, MAX_EXPERTS, &newer));
    if (c->n_experts >= 0 && newer >= 0 && newer != c->n_experts)
        return qc_fail(r->err, QC_E_INPUT, "%s: %s is %lld, but %s is %lld", r->file, e->count_key,
                       (long long)c->n_experts, e->new_count_key, (long long)newer);
    c->n_experts = qc_max_i64(c->n_experts, newer);
    bool given = c->n_experts >= 0;
    c->n_experts = given ? c->n_experts : e->count;
    if (!given)
        QC_TRY(qc_config_note(r, QC_LOG_WARN, "%s: %s is absent, class default %lld", r->file, e->count_key,
                              (long long)e->count));
    if (c->n_experts == 0)
        return QC_OK;
    QC_TRY(qc_config_count(r, "num_experts_per_tok", e->chosen, c->n_experts, &c->n_chosen));
    c->expert_ffn = c->ffn;
    if (e->ffn_key)
        QC_TRY(qc_config_count(r, e->ffn_key, e->ffn, QC_DIM_MAX, &c->expert_ffn));
    c->renormalise = e->renormalise;
    if (!e->renormalise)
        QC_TRY(qc_config_bool(r, r->json, "norm_topk_prob", false, &c->renormalise));
    return read_sparse_layers(r);
}

int qc_config_read_layers(qc_config_reader *r)
{
    QC_TRY(read_experts(r));
    QC_TRY(read_rotation(r));
    return read_window(r);
}
