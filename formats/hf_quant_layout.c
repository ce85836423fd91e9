#include "hf_quant_internal.h"

#include "hf_quant_config.h"
#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_log.h"

#include <stdio.h>
#include <string.h>

/* ---- config ---- */

static int fail(const qc_quant_layout *l, int code, const char *module, const char *text, qc_err *err)
{
    return qc_fail(err, code, "%s: %.200s: %s", l->inner->path, module, text);
}

static const char *text_key(const cJSON *config, const char *key, const char *other)
{
    const char *text = cJSON_GetStringValue(qc_json_get(config, key));
    return text || !other ? text : cJSON_GetStringValue(qc_json_get(config, other));
}

static int init_gptq(qc_quant_layout *l, qc_err *err)
{
    const char *format = text_key(l->config, "checkpoint_format", "format");
    l->v2 = format && strcmp(format, "gptq_v2") == 0;
    if (cJSON_IsTrue(qc_json_get(l->config, "is_marlin_format")) ||
        (format && !l->v2 && strcmp(format, "gptq") != 0))
        return qc_fail(
            err, QC_E_UNSUPPORTED,
            "%s: config.json: checkpoint_format %.60s of GPTQ is not read (read are gptq, gptq_v2)",
            l->inner->path, format ? format : "marlin");
    return QC_OK;
}

static int init_awq(qc_quant_layout *l, qc_err *err)
{
    const char *version = text_key(l->config, "version", NULL);
    if (version && strcmp(version, "gemm") != 0 && strcmp(version, "GEMM") != 0)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: config.json: version %.60s of AWQ is not read (read is gemm)", l->inner->path,
                       version);
    return QC_OK;
}

int qc_quant_layout_init(qc_quant_layout *l, qc_err *err)
{
    l->format = cJSON_GetStringValue(qc_json_get(l->config, "quant_method"));
    if (strcmp(l->format, "gptq") == 0)
        return init_gptq(l, err);
    if (strcmp(l->format, "awq") == 0)
        return init_awq(l, err);
    return qc_ct_config_check(l->inner->path, l->config, err);
}

/* ---- parts ---- */

/* Does the name end in ".suffix"? Then *ret_module = bytes in front of that. */
static bool has_suffix(const char *name, const char *suffix, int *ret_module)
{
    size_t n = strlen(name), m = strlen(suffix);
    if (n <= m + 1 || name[n - m - 1] != '.' || strcmp(name + n - m, suffix) != 0)
        return false;
    *ret_module = (int)(n - m - 1);
    return true;
}

/* Inner tensor MODULE.suffix; -1 if there is none. */
static int64_t find_part(const qc_quant_layout *l, const char *name, int module, const char *suffix)
{
    char *full = qc_asprintf("%.*s.%s", module, name, suffix);
    int64_t i = full ? l->inner->find(l->inner, full) : -1;
    qc_free(full);
    return i;
}

/* Parts of t as the packing wants them for its grid. */
static int take_parts(const qc_quant_layout *l, const char *name, int module, qc_logical *t, qc_err *err)
{
    qc_part parts[QC_MAX_PARTS];
    char want[128], found[128];
    int n = t->packing->parts(&t->grid_info, parts);
    for (int p = 0; p < QC_MAX_PARTS; p++)
        t->parts[p] = -1;
    t->info.n_bytes = 0;
    for (int p = 0; p < n; p++) {
        const qc_part *part = &parts[p];
        t->parts[p] = find_part(l, name, module, part->suffix);
        if (t->parts[p] < 0 && strcmp(part->suffix, "g_idx") == 0)
            continue; /* in order, as loaders take it */
        if (t->parts[p] < 0)
            return qc_fail(err, QC_E_INPUT, "%s: tensor \"%.*s.%s\" is missing beside \"%.200s\"",
                           l->inner->path, module, name, part->suffix, name);
        const qc_tensor_info *info = l->inner->info(l->inner, t->parts[p]);
        bool flat = part->n_dims == 2 && part->shape[1] == 1 && info->n_dims == 1; /* [n] for [n, 1] */
        qc_shape_text(info->shape, info->n_dims, found, sizeof found);
        qc_shape_text(part->shape, part->n_dims, want, sizeof want);
        if (info->dtype != part->dtype || (!flat && info->n_dims != part->n_dims) ||
            memcmp(info->shape, part->shape, (size_t)info->n_dims * sizeof *info->shape) != 0)
            return qc_fail(err, QC_E_INPUT, "%s: tensor \"%.200s\" is %s %s, expected %s %s", l->inner->path,
                           info->name, qc_dtype_name(info->dtype), found, qc_dtype_name(part->dtype), want);
        t->info.n_bytes += info->n_bytes;
    }
    t->grid_info.n_bytes = t->info.n_bytes;
    return QC_OK;
}

/* A matrix MODULE.weight [rows, cols] on a grid. */
static int name_matrix(const char *name, int module, int64_t rows, int64_t cols, const qc_grid *grid,
                       qc_logical *t, qc_err *err)
{
    t->name = qc_asprintf("%.*s.weight", module, name);
    if (!t->name)
        return qc_fail_nomem(err, name, (unsigned long long)module);
    t->info = (qc_tensor_info){
        .name = t->name, .dtype = QC_DT_GRID, .n_dims = 2, .shape = {rows, cols}, .grid = *grid};
    t->grid_info = t->info;
    return QC_OK;
}

/* Are all words of an inner tensor the same value? */
static bool all_words(const qc_quant_layout *l, int64_t tensor, uint32_t value)
{
    const qc_tensor_info *info = l->inner->info(l->inner, tensor);
    const char *data = l->inner->raw(l->inner, tensor);
    for (uint64_t at = 0; at + 4 <= info->n_bytes; at += 4) {
        uint32_t word;
        memcpy(&word, data + at, sizeof word);
        if (word != value)
            return false;
    }
    return true;
}

static int find_matrix_part(const qc_quant_layout *l, const char *name, int module, const char *suffix,
                            int64_t *ret, qc_err *err)
{
    *ret = find_part(l, name, module, suffix);
    if (*ret >= 0 && l->inner->info(l->inner, *ret)->n_dims == 2)
        return QC_OK;
    return qc_fail(err, QC_E_INPUT, "%s: tensor \"%.*s.%s\" is missing beside \"%.200s\", or no matrix",
                   l->inner->path, module, name, suffix, name);
}

/* Columns per group from the number of groups; 0 if they do not divide. */
static int64_t group_of(int64_t cols, int64_t n_groups)
{
    return n_groups > 0 && cols % n_groups == 0 ? cols / n_groups : 0;
}

static qc_grid affine(int64_t bits, bool symmetric, int64_t group_elems, qc_dtype scale)
{
    return (qc_grid){.kind = QC_GRID_AFFINE,
                     .bits = (int)bits,
                     .symmetric = symmetric,
                     .group_elems = group_elems,
                     .scale_dtype = scale};
}

/* ---- GPTQ ---- */

/* Groups of the columns in the order of their groups? Else they are kept. */
static int read_g_idx(const qc_quant_layout *l, int64_t tensor, qc_logical *t, qc_err *err)
{
    const char *data = l->inner->raw(l->inner, tensor);
    int64_t cols = qc_tensor_cols(&t->grid_info), groups = qc_tensor_n_groups(&t->grid_info);
    int32_t *g_idx = qc_alloc((size_t)cols, sizeof *g_idx);
    bool ordered = true;
    if (!g_idx)
        return qc_fail_nomem(err, t->name, (size_t)cols * sizeof *g_idx);
    memcpy(g_idx, data, (size_t)cols * sizeof *g_idx);
    for (int64_t c = 0; c < cols; c++) {
        if (g_idx[c] < 0 || g_idx[c] >= groups) {
            int bad = (int)g_idx[c];
            qc_free(g_idx);
            return qc_fail(err, QC_E_INPUT, "%s: tensor \"%.200s\" names group %d, there are %lld",
                           l->inner->path, l->inner->info(l->inner, tensor)->name, bad, (long long)groups);
        }
        ordered = ordered && g_idx[c] == c / t->grid_info.grid.group_elems;
    }
    if (ordered) {
        qc_free(g_idx);
        return QC_OK;
    }
    t->g_idx = g_idx;
    t->info.dtype = QC_DT_F32; /* a product of an F16 scale and a small integer is exact in it */
    t->info.grid = (qc_grid){0};
    return QC_OK;
}

static int gptq_matrix(const qc_quant_layout *l, int64_t i, int module, qc_logical *t, qc_err *err)
{
    const qc_tensor_info *qweight = l->inner->info(l->inner, i);
    const char *name = qweight->name;
    int64_t scales, qzeros;
    QC_TRY(find_matrix_part(l, name, module, "scales", &scales, err));
    QC_TRY(find_matrix_part(l, name, module, "qzeros", &qzeros, err));
    const qc_tensor_info *s = l->inner->info(l->inner, scales), *z = l->inner->info(l->inner, qzeros);
    int64_t rows = qweight->n_dims == 2 ? qweight->shape[1] : 0;
    int64_t bits = rows > 0 && z->shape[1] <= rows ? z->shape[1] * 32 / rows : 0;
    if (bits == 2 || bits == 3)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: tensor \"%.200s\": GPTQ with %lld bits is not read (4 and 8 are)", l->inner->path,
                       name, (long long)bits);
    if ((bits != 4 && bits != 8) || rows % (32 / bits) || qweight->shape[0] > INT64_C(1) << 40)
        return fail(l, QC_E_INPUT, name, "the shapes of qweight and qzeros do not belong together", err);
    int64_t cols = qweight->shape[0] * 32 / bits;
    qc_grid grid = affine(bits, false, group_of(cols, s->shape[0]), s->dtype);
    if (!grid.group_elems)
        return fail(l, QC_E_INPUT, name, "the groups of its scales do not divide its inputs", err);
    if (s->dtype != QC_DT_F16)
        return fail(l, QC_E_UNSUPPORTED, s->name, "scales of GPTQ are expected in F16", err);
    uint32_t ones = 0xffffffffu / ((1u << bits) - 1), middle = ones << (bits - 1),
             stored = l->v2 ? middle : middle - ones;
    grid.symmetric = all_words(l, qzeros, stored);
    if (!grid.symmetric && cJSON_IsTrue(qc_json_get(l->config, "sym")) &&
        all_words(l, qzeros, l->v2 ? middle - ones : middle))
        qc_log(QC_LOG_WARN,
               "%s: tensor \"%.200s\": config.json says symmetric and %s, but the zero points fit %s only",
               l->inner->path, z->name, l->v2 ? "gptq_v2" : "gptq", l->v2 ? "gptq" : "gptq_v2");
    t->packing = l->v2 ? &qc_packing_gptq_v2 : &qc_packing_gptq_v1;
    QC_TRY(name_matrix(name, module, rows, cols, &grid, t, err));
    QC_TRY(take_parts(l, name, module, t, err));
    return t->parts[3] < 0 ? QC_OK : read_g_idx(l, t->parts[3], t, err);
}

/* ---- AWQ ---- */

static int awq_matrix(const qc_quant_layout *l, int64_t i, int module, qc_logical *t, qc_err *err)
{
    const qc_tensor_info *qweight = l->inner->info(l->inner, i);
    const char *name = qweight->name;
    int64_t scales, qzeros;
    QC_TRY(find_matrix_part(l, name, module, "scales", &scales, err));
    QC_TRY(find_matrix_part(l, name, module, "qzeros", &qzeros, err));
    const qc_tensor_info *s = l->inner->info(l->inner, scales);
    int64_t cols = qweight->n_dims == 2 ? qweight->shape[0] : 0;
    if (cols == 0 || qweight->shape[1] > INT64_C(1) << 40 || s->shape[1] != qweight->shape[1] * 8)
        return fail(l, QC_E_INPUT, name, "the shapes of qweight and scales do not belong together", err);
    qc_grid grid = affine(4, false, group_of(cols, s->shape[0]), s->dtype);
    if (!grid.group_elems)
        return fail(l, QC_E_INPUT, name, "the groups of its scales do not divide its inputs", err);
    if (s->dtype != QC_DT_F16)
        return fail(l, QC_E_UNSUPPORTED, s->name, "scales of AWQ are expected in F16", err);
    grid.symmetric = all_words(l, qzeros, 0x88888888u);
    t->packing = &qc_packing_awq;
    QC_TRY(name_matrix(name, module, s->shape[1], cols, &grid, t, err));
    return take_parts(l, name, module, t, err);
}

/* ---- compressed-tensors ---- */

static bool is_scale_type(qc_dtype dtype)
{
    return dtype == QC_DT_F16 || dtype == QC_DT_BF16 || dtype == QC_DT_F32;
}

static int ct_packed_matrix(const qc_quant_layout *l, int64_t i, int module, qc_logical *t, qc_err *err)
{
    const qc_tensor_info *packed = l->inner->info(l->inner, i);
    const char *name = packed->name;
    int64_t scale, shape = find_part(l, name, module, "weight_shape"), dims[2];
    QC_TRY(find_matrix_part(l, name, module, "weight_scale", &scale, err));
    if (shape < 0 || l->inner->info(l->inner, shape)->n_bytes != sizeof dims || packed->n_dims != 2)
        return fail(l, QC_E_INPUT, name, "expected a matrix with weight_shape, two 64-bit numbers, beside it",
                    err);
    memcpy(dims, l->inner->raw(l->inner, shape), sizeof dims);
    const qc_tensor_info *s = l->inner->info(l->inner, scale);
    int64_t limit = INT64_C(1) << 40;
    if (dims[0] != packed->shape[0] || dims[1] <= 0 || dims[1] > limit || packed->shape[1] > limit)
        return fail(l, QC_E_INPUT, name, "weight_shape and the shape of weight_packed do not belong together",
                    err);
    int64_t bits = packed->shape[1] * 32 / dims[1];
    if ((bits != 4 && bits != 8) || dims[1] % (32 / bits) || packed->shape[1] * 32 != bits * dims[1])
        return fail(l, QC_E_UNSUPPORTED, name, "only 4 and 8 bits that fill their words are read", err);
    bool symmetric = find_part(l, name, module, "weight_zero_point") < 0;
    qc_grid grid = affine(bits, symmetric, group_of(dims[1], s->shape[1]), s->dtype);
    if (!grid.group_elems || !is_scale_type(s->dtype) || (!symmetric && dims[0] % (32 / bits)))
        return fail(l, QC_E_INPUT, s->name,
                    "expected F16, BF16 or F32 scales of groups that divide the inputs", err);
    if (find_part(l, name, module, "weight_g_idx") >= 0)
        return fail(l, QC_E_UNSUPPORTED, name,
                    "compressed-tensors with actorder group (weight_g_idx) is not read", err);
    t->packing = &qc_packing_ct_packed;
    QC_TRY(name_matrix(name, module, dims[0], dims[1], &grid, t, err));
    QC_TRY(qc_ct_config_acts(l->inner->path, l->config, name, module, &t->info.act_bits, err));
    return take_parts(l, name, module, t, err);
}

static int ct_int_matrix(const qc_quant_layout *l, int64_t i, int module, qc_logical *t, qc_err *err)
{
    const qc_tensor_info *weight = l->inner->info(l->inner, i);
    const char *name = weight->name;
    int64_t scale = find_part(l, name, module, "weight_scale");
    if (scale < 0 || weight->n_dims != 2)
        return fail(l, QC_E_INPUT, name, "INT8 weights without their weight_scale", err);
    const qc_tensor_info *s = l->inner->info(l->inner, scale);
    if (find_part(l, name, module, "weight_zero_point") >= 0 || qc_tensor_n_elems(s) != weight->shape[0] ||
        !is_scale_type(s->dtype))
        return fail(l, QC_E_UNSUPPORTED, name,
                    "int-quantized weights are read with one scale per row and no zero points", err);
    qc_grid grid = affine(8, true, weight->shape[1], s->dtype);
    t->packing = &qc_packing_ct_int;
    QC_TRY(name_matrix(name, module, weight->shape[0], weight->shape[1], &grid, t, err));
    QC_TRY(qc_ct_config_acts(l->inner->path, l->config, name, module, &t->info.act_bits, err));
    return take_parts(l, name, module, t, err);
}

/* ---- any tensor ---- */

/* Further parts of a matrix, which come with its first one. */
static int check_companion(const qc_quant_layout *l, const char *name, bool *ret_is, qc_err *err)
{
    static const struct {
        const char *suffix, *first[2];
    } table[] = {{"qzeros", {"qweight"}},
                 {"scales", {"qweight"}},
                 {"g_idx", {"qweight"}},
                 {"weight_scale", {"weight_packed", "weight"}},
                 {"weight_shape", {"weight_packed"}},
                 {"weight_zero_point", {"weight_packed", "weight"}},
                 {"weight_g_idx", {"weight_packed"}}};
    static const char *const refused[] = {"input_scale", "input_zero_point", "k_scale", "v_scale",
                                          "output_scale"};
    int module;
    *ret_is = false;
    for (size_t k = 0; k < sizeof refused / sizeof refused[0]; k++)
        if (has_suffix(name, refused[k], &module))
            return fail(l, QC_E_UNSUPPORTED, name, "scales of activations that are stored are not read", err);
    for (size_t k = 0; k < sizeof table / sizeof table[0] && !*ret_is; k++) {
        if (!has_suffix(name, table[k].suffix, &module))
            continue;
        for (int f = 0; f < 2 && table[k].first[f]; f++)
            *ret_is = *ret_is || find_part(l, name, module, table[k].first[f]) >= 0;
        if (!*ret_is)
            return qc_fail(err, QC_E_INPUT, "%s: tensor \"%.200s\" without \"%.*s.%s\"", l->inner->path, name,
                           module, name, table[k].first[0]);
    }
    return QC_OK;
}

static int plain_tensor(const qc_quant_layout *l, int64_t i, qc_logical *t, qc_err *err)
{
    const qc_tensor_info *info = l->inner->info(l->inner, i);
    if (info->dtype != QC_DT_F16 && info->dtype != QC_DT_BF16 && info->dtype != QC_DT_F32)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: tensor \"%.200s\" holds %s, which is no part of a %s checkpoint", l->inner->path,
                       info->name, qc_dtype_name(info->dtype), l->format);
    t->info = *info;
    t->parts[0] = i;
    return QC_OK;
}

int qc_quant_layout_tensor(const qc_quant_layout *l, int64_t i, qc_logical *ret, bool *ret_whole, qc_err *err)
{
    const qc_tensor_info *info = l->inner->info(l->inner, i);
    qc_logical t = {.parts = {-1, -1, -1, -1}};
    bool companion, awq = strcmp(l->format, "awq") == 0, ct = !awq && strcmp(l->format, "gptq") != 0;
    int module, rc;
    QC_TRY(check_companion(l, info->name, &companion, err));
    *ret = t;
    *ret_whole = !companion;
    if (companion)
        return QC_OK;
    if (!ct && has_suffix(info->name, "qweight", &module))
        rc = awq ? awq_matrix(l, i, module, &t, err) : gptq_matrix(l, i, module, &t, err);
    else if (ct && has_suffix(info->name, "weight_packed", &module))
        rc = ct_packed_matrix(l, i, module, &t, err);
    else if (ct && info->dtype == QC_DT_I8 && has_suffix(info->name, "weight", &module))
        rc = ct_int_matrix(l, i, module, &t, err);
    else
        rc = plain_tensor(l, i, &t, err);
    if (rc == QC_OK) {
        *ret = t;
        return QC_OK;
    }
    qc_free(t.name);
    qc_free(t.g_idx);
    return rc;
}
