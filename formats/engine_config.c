/* How config.json says what is packed how. */
#include "engine_format.h"
#include "st_write.h"

#include "qc_alloc.h"
#include "qc_json.h"

#include <stdio.h>
#include <string.h>

/* ---- schemes ---- */

int qc_schemes_add(qc_schemes *s, const qc_tensor_info *info, qc_err *err)
{
    if (s->n_entries == s->cap_entries) {
        int64_t cap = s->cap_entries ? 2 * s->cap_entries : 256;
        void *p = qc_realloc(s->entries, (size_t)s->cap_entries * sizeof *s->entries,
                             (size_t)cap * sizeof *s->entries);
        if (!p)
            return qc_fail_nomem(err, info->name, (size_t)cap * sizeof *s->entries);
        s->entries = p;
        s->cap_entries = cap;
    }
    qc_scheme_entry e = {qc_strndup(info->name, strlen(info->name) - strlen(".weight")), -1,
                         qc_tensor_cols(info)};
    if (!e.module)
        return qc_fail_nomem(err, info->name, strlen(info->name));
    s->entries[s->n_entries++] = e;
    if (info->dtype != QC_DT_GRID)
        return QC_OK;
    int64_t group = info->grid.group_elems < qc_tensor_cols(info) ? info->grid.group_elems : -1;
    qc_scheme scheme = {info->grid.bits, info->grid.symmetric, group, info->act_bits};
    int i = 0;
    while (i < s->n_schemes &&
           (s->schemes[i].bits != scheme.bits || s->schemes[i].symmetric != scheme.symmetric ||
            s->schemes[i].group != scheme.group || s->schemes[i].act_bits != scheme.act_bits))
        i++;
    if (i == s->n_schemes) {
        void *p = qc_realloc(s->schemes, (size_t)i * sizeof scheme, (size_t)(i + 1) * sizeof scheme);
        if (!p)
            return qc_fail_nomem(err, info->name, sizeof scheme);
        s->schemes = p;
        s->schemes[s->n_schemes++] = scheme;
    }
    s->entries[s->n_entries - 1].scheme = i;
    return QC_OK;
}

/* One group over the whole width and one scale per row are the same to a matrix, but not to a config. */
static void merge_whole_groups(qc_schemes *s)
{
    for (int64_t k = 0; k < s->n_entries; k++) {
        qc_scheme_entry *e = &s->entries[k];
        for (int i = 0; e->scheme >= 0 && s->schemes[e->scheme].group < 0 && i < s->n_schemes; i++) {
            const qc_scheme *own = &s->schemes[e->scheme], *other = &s->schemes[i];
            if (other->group == e->cols && other->bits == own->bits && other->symmetric == own->symmetric &&
                other->act_bits == own->act_bits)
                e->scheme = i;
        }
    }
    for (int i = s->n_schemes - 1; i >= 0; i--) { /* drop what nothing has any more */
        int64_t n = 0;
        for (int64_t k = 0; k < s->n_entries; k++)
            n += s->entries[k].scheme == i;
        for (int64_t k = 0; k < s->n_entries && n == 0; k++)
            s->entries[k].scheme -= s->entries[k].scheme > i;
        if (n == 0)
            memmove(&s->schemes[i], &s->schemes[i + 1], (size_t)(--s->n_schemes - i) * sizeof *s->schemes);
    }
}

void qc_schemes_sort(qc_schemes *s)
{
    merge_whole_groups(s);
    int best = 0;
    int64_t best_n = 0;
    for (int i = 0; i < s->n_schemes; i++) {
        int64_t n = 0;
        for (int64_t k = 0; k < s->n_entries; k++)
            n += s->entries[k].scheme == i;
        if (n > best_n) {
            best = i;
            best_n = n;
        }
    }
    if (best == 0)
        return;
    qc_scheme first = s->schemes[0];
    s->schemes[0] = s->schemes[best];
    s->schemes[best] = first;
    for (int64_t k = 0; k < s->n_entries; k++)
        s->entries[k].scheme = s->entries[k].scheme == 0      ? best
                               : s->entries[k].scheme == best ? 0
                                                              : s->entries[k].scheme;
}

void qc_schemes_clear(qc_schemes *s)
{
    for (int64_t i = 0; i < s->n_entries; i++)
        qc_free(s->entries[i].module);
    qc_free(s->entries);
    qc_free(s->schemes);
    *s = (qc_schemes){0};
}

static bool any_asymmetric(const qc_schemes *s)
{
    for (int i = 0; i < s->n_schemes; i++)
        if (!s->schemes[i].symmetric)
            return true;
    return false;
}

static int refuse_acts(const qc_schemes *s, const char *format, qc_err *err)
{
    for (int i = 0; i < s->n_schemes; i++)
        if (s->schemes[i].act_bits)
            return qc_fail(err, QC_E_UNSUPPORTED,
                           "%s holds no quantized activations (quantize.activations: none, or format "
                           "compressed-tensors or qpk)",
                           format);
    return QC_OK;
}

/* ---- config ---- */

/* "+:^model\.layers\.0\.x$": a regular expression for exactly one module, behind the mark of what is said of
 * it. An engine that fuses matrices asks for the fused one by its name: the first member of it answers to
 * both names. What is left out it knows from the tensors. */
static void module_pattern(bool left_out, const char *module, char *ret, size_t ret_bytes)
{
    static const char *const first[][2] = {{".q_proj", "\\.(q|qkv)_proj"},
                                           {".gate_proj", "\\.(gate|gate_up)_proj"}};
    size_t n = (size_t)snprintf(ret, ret_bytes, "%s^", left_out ? "-:" : "+:"), stem = strlen(module);
    const char *ending = "";
    for (size_t i = 0; i < sizeof first / sizeof first[0] && !left_out; i++) {
        size_t n_name = strlen(first[i][0]);
        if (stem > n_name && strcmp(module + stem - n_name, first[i][0]) == 0) {
            ending = first[i][1];
            stem -= n_name;
            break;
        }
    }
    for (size_t i = 0; i < stem && n + 4 < ret_bytes; i++) {
        if (module[i] == '.')
            ret[n++] = '\\';
        ret[n++] = module[i];
    }
    snprintf(ret + n, ret_bytes - n, "%s$", ending);
}

static bool gptq_is_v2(const qc_schemes *s)
{
    return s->type ? strcmp(s->type, "v2") == 0 : any_asymmetric(s);
}

static const qc_packing *gptq_packing(const qc_schemes *s, const qc_tensor_info *info)
{
    (void)info;
    return gptq_is_v2(s) ? &qc_packing_gptq_v2 : &qc_packing_gptq_v1;
}

static void add_quantizer(cJSON *config, const char *tool)
{
    cJSON *meta = cJSON_AddObjectToObject(config, "meta");
    cJSON *list = cJSON_AddArrayToObject(meta, "quantizer");
    qc_json_add_item(list, cJSON_CreateString(tool ? tool : "qconvert"));
}

/* Matrices with another grid than most, and those left in 16 bit, by patterns of their names. */
static void add_dynamic(const qc_schemes *s, bool symmetric, cJSON *config)
{
    cJSON *dynamic = NULL;
    char pattern[600];
    for (int64_t i = 0; i < s->n_entries; i++) {
        const qc_scheme_entry *e = &s->entries[i];
        if (e->scheme == 0)
            continue;
        if (!dynamic)
            dynamic = cJSON_AddObjectToObject(config, "dynamic");
        module_pattern(e->scheme < 0, e->module, pattern, sizeof pattern);
        cJSON *rule = cJSON_AddObjectToObject(dynamic, pattern);
        if (e->scheme < 0)
            continue;
        cJSON_AddNumberToObject(rule, "bits", s->schemes[e->scheme].bits);
        cJSON_AddNumberToObject(rule, "group_size", (double)s->schemes[e->scheme].group);
        cJSON_AddBoolToObject(rule, "sym", symmetric);
        cJSON_AddBoolToObject(rule, "desc_act", false);
    }
}

static int gptq_config(const qc_schemes *s, cJSON **ret, qc_err *err)
{
    QC_TRY(refuse_acts(s, "gptq", err));
    if (s->n_schemes == 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "gptq: no matrix of the layers is on a grid");
    const char *format = gptq_is_v2(s) ? "gptq_v2" : "gptq";
    bool symmetric = !any_asymmetric(s);
    cJSON *c = cJSON_CreateObject();
    cJSON_AddStringToObject(c, "quant_method", "gptq");
    cJSON_AddStringToObject(c, "checkpoint_format", format);
    cJSON_AddStringToObject(c, "format", format);
    cJSON_AddNumberToObject(c, "bits", s->schemes[0].bits);
    cJSON_AddNumberToObject(c, "group_size", (double)s->schemes[0].group);
    cJSON_AddBoolToObject(c, "sym", symmetric);
    cJSON_AddBoolToObject(c, "desc_act", false);
    cJSON_AddBoolToObject(c, "lm_head", false);
    cJSON_AddStringToObject(c, "pack_dtype", "int32");
    add_dynamic(s, symmetric, c);
    add_quantizer(c, s->tool);
    *ret = c;
    return QC_OK;
}

static const qc_packing *awq_packing(const qc_schemes *s, const qc_tensor_info *info)
{
    (void)s;
    (void)info;
    return &qc_packing_awq;
}

static int awq_config(const qc_schemes *s, cJSON **ret, qc_err *err)
{
    QC_TRY(refuse_acts(s, "awq", err));
    if (s->n_schemes == 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "awq: no matrix of the layers is on a grid");
    for (int64_t i = 0; i < s->n_entries; i++)
        if (s->entries[i].scheme >= 0 && s->schemes[s->entries[i].scheme].group != s->schemes[0].group)
            return qc_fail(err, QC_E_UNSUPPORTED,
                           "awq: %s has group %lld where others have %lld, and the format has one for all",
                           s->entries[i].module, (long long)s->schemes[s->entries[i].scheme].group,
                           (long long)s->schemes[0].group);
    cJSON *c = cJSON_CreateObject(), *skipped = NULL;
    cJSON_AddStringToObject(c, "quant_method", "awq");
    cJSON_AddNumberToObject(c, "bits", 4);
    cJSON_AddNumberToObject(c, "group_size", (double)s->schemes[0].group);
    cJSON_AddBoolToObject(c, "zero_point", true);
    cJSON_AddStringToObject(c, "version", "gemm");
    for (int64_t i = 0; i < s->n_entries; i++) {
        if (s->entries[i].scheme >= 0)
            continue;
        if (!skipped)
            skipped = cJSON_AddArrayToObject(c, "modules_to_not_convert");
        qc_json_add_item(skipped, cJSON_CreateString(s->entries[i].module));
    }
    if (!skipped)
        cJSON_AddNullToObject(c, "modules_to_not_convert");
    *ret = c;
    return QC_OK;
}

static bool ct_is_int(const qc_scheme *s)
{
    return s->act_bits != 0;
}

static const qc_packing *ct_packing(const qc_schemes *s, const qc_tensor_info *info)
{
    (void)s;
    return info->act_bits ? &qc_packing_ct_int : &qc_packing_ct_packed;
}

static const char *ct_format(const qc_scheme *s)
{
    return ct_is_int(s) ? "int-quantized" : "pack-quantized";
}

/* The keys of QuantizationArgs; the class refuses any other. */
static void add_args(cJSON *group, const char *key, int bits, bool symmetric, const char *strategy,
                     int64_t group_size, bool dynamic)
{
    cJSON *a = cJSON_AddObjectToObject(group, key);
    cJSON_AddNumberToObject(a, "num_bits", bits);
    cJSON_AddStringToObject(a, "type", "int");
    cJSON_AddBoolToObject(a, "symmetric", symmetric);
    cJSON_AddStringToObject(a, "strategy", strategy);
    if (group_size > 0)
        cJSON_AddNumberToObject(a, "group_size", (double)group_size);
    else
        cJSON_AddNullToObject(a, "group_size");
    cJSON_AddNullToObject(a, "block_structure");
    cJSON_AddBoolToObject(a, "dynamic", dynamic);
    cJSON_AddNullToObject(a, "actorder");
    if (dynamic)
        cJSON_AddNullToObject(a, "observer");
    else
        cJSON_AddStringToObject(a, "observer", "minmax");
    cJSON_AddObjectToObject(a, "observer_kwargs");
}

static void add_ct_group(const qc_schemes *s, int i, cJSON *groups)
{
    char name[32];
    const qc_scheme *scheme = &s->schemes[i];
    snprintf(name, sizeof name, "group_%d", i);
    cJSON *g = cJSON_AddObjectToObject(groups, name), *targets = cJSON_AddArrayToObject(g, "targets");
    if (i == 0)
        qc_json_add_item(targets, cJSON_CreateString("Linear"));
    for (int64_t k = 0; k < s->n_entries && i > 0; k++)
        if (s->entries[k].scheme == i)
            qc_json_add_item(targets, cJSON_CreateString(s->entries[k].module));
    cJSON_AddStringToObject(g, "format", ct_format(scheme));
    add_args(g, "weights", scheme->bits, scheme->symmetric, scheme->group > 0 ? "group" : "channel",
             scheme->group, false);
    if (scheme->act_bits)
        add_args(g, "input_activations", scheme->act_bits, true, "token", 0, true);
    else
        cJSON_AddNullToObject(g, "input_activations");
    cJSON_AddNullToObject(g, "output_activations");
}

static int check_ct_scheme(const qc_scheme *s, qc_err *err)
{
    if (!s->act_bits || (s->act_bits == 8 && s->bits == 8 && s->symmetric && s->group < 0))
        return QC_OK;
    return qc_fail(err, QC_E_UNSUPPORTED,
                   "compressed-tensors: INT%d %s weights with %s and INT%d activations; with activations it "
                   "holds symmetric INT8 weights, one scale per row, and INT8 activations",
                   s->bits, s->symmetric ? "symmetric" : "asymmetric",
                   s->group > 0 ? "groups" : "one scale per row", s->act_bits);
}

static int ct_config(const qc_schemes *s, cJSON **ret, qc_err *err)
{
    if (s->n_schemes == 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "compressed-tensors: no matrix of the layers is on a grid");
    const char *format = ct_format(&s->schemes[0]);
    for (int i = 0; i < s->n_schemes; i++) {
        QC_TRY(check_ct_scheme(&s->schemes[i], err));
        if (strcmp(ct_format(&s->schemes[i]), format) != 0)
            format = "mixed-precision";
    }
    cJSON *c = cJSON_CreateObject();
    cJSON_AddStringToObject(c, "quant_method", "compressed-tensors");
    cJSON_AddStringToObject(c, "version", "0.12.2");
    cJSON_AddStringToObject(c, "format", format);
    cJSON_AddStringToObject(c, "quantization_status", "compressed");
    cJSON_AddNullToObject(c, "global_compression_ratio");
    cJSON *ignore = cJSON_AddArrayToObject(c, "ignore");
    qc_json_add_item(ignore, cJSON_CreateString("lm_head"));
    for (int64_t i = 0; i < s->n_entries; i++)
        if (s->entries[i].scheme < 0)
            qc_json_add_item(ignore, cJSON_CreateString(s->entries[i].module));
    cJSON_AddNullToObject(c, "kv_cache_scheme");
    cJSON *groups = cJSON_AddObjectToObject(c, "config_groups");
    for (int i = 0; i < s->n_schemes; i++)
        add_ct_group(s, i, groups);
    *ret = c;
    return QC_OK;
}

static const qc_packing *hf_packing(const qc_schemes *s, const qc_tensor_info *info)
{
    (void)s;
    (void)info;
    return NULL;
}

static int hf_config(const qc_schemes *s, cJSON **ret, qc_err *err)
{
    QC_TRY(refuse_acts(s, "hf", err));
    *ret = NULL;
    return QC_OK;
}

const qc_engine_format qc_engine_gptq = {.title = "GPTQ",
                                         .library = "transformers",
                                         .new_set = qc_st_set_new,
                                         .packing = gptq_packing,
                                         .config = gptq_config,
                                         .config_file = "quantize_config.json"};
const qc_engine_format qc_engine_awq = {.title = "AWQ (GEMM)",
                                        .library = "transformers",
                                        .new_set = qc_st_set_new,
                                        .packing = awq_packing,
                                        .config = awq_config};
const qc_engine_format qc_engine_ct = {.title = "compressed-tensors",
                                       .library = "transformers",
                                       .new_set = qc_st_set_new,
                                       .packing = ct_packing,
                                       .config = ct_config};
const qc_engine_format qc_engine_hf = {.title = "Hugging Face",
                                       .library = "transformers",
                                       .new_set = qc_st_set_new,
                                       .packing = hf_packing,
                                       .config = hf_config};
