#include "hf_prequant.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"

#include <stdio.h>
#include <string.h>

#define MAX_CONFIG_BYTES (16u << 20)

/* Methods whose checkpoints are read (hf_quant.h). */
static bool is_read(const char *method)
{
    static const char *const methods[] = {"gptq", "awq", "compressed-tensors"};
    for (size_t i = 0; method && i < sizeof methods / sizeof methods[0]; i++)
        if (strcmp(method, methods[i]) == 0)
            return true;
    return false;
}

/* One level of config.json: the keys that transformers, compressed-tensors and MLX use. */
static int check_level(const char *path, const cJSON *level, bool top, cJSON **ret, qc_err *err)
{
    static const char *const keys[] = {"quantization_config", "compression_config", "quantization"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0] && !*ret; i++) {
        const cJSON *q = qc_json_get(level, keys[i]);
        if (!q)
            continue;
        const char *method = cJSON_GetStringValue(qc_json_get(q, "quant_method"));
        if (top && i == 0 && method && strcmp(method, "fp8") == 0) /* hf_view.h reads it */
            continue;
        if (!is_read(method))
            return qc_fail(
                err, QC_E_UNSUPPORTED,
                "%s: checkpoint is quantized by a method that is not read (%s, method %.100s; read "
                "are gptq, awq, compressed-tensors, fp8)",
                path, keys[i], method ? method : "not named");
        if (!(*ret = cJSON_Duplicate(q, true)))
            return qc_fail_nomem(err, path, 4096);
    }
    return QC_OK;
}

int qc_hf_prequant_config(const char *folder, cJSON **ret, qc_err *err)
{
    cJSON *doc = NULL, *found = NULL;
    char *path = qc_path_join(folder, "config.json");
    if (!path)
        return qc_fail_nomem(err, folder, sizeof "config.json");
    int rc = qc_path_exists(path) ? qc_json_load(path, MAX_CONFIG_BYTES, true, &doc, err) : QC_OK;
    if (rc == QC_OK && doc && cJSON_IsObject(doc)) {
        rc = check_level(path, doc, true, &found, err);
        for (const cJSON *c = doc->child; c && rc == QC_OK; c = c->next) /* text_config and its kind */
            if (cJSON_IsObject(c))
                rc = check_level(path, c, false, &found, err);
    }
    cJSON_Delete(doc);
    qc_free(path);
    if (rc == QC_OK)
        *ret = found;
    else
        cJSON_Delete(found);
    return rc;
}

static bool ends_with(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && strcmp(s + n - m, suffix) == 0;
}

static bool is_integer(qc_dtype dtype)
{
    switch (dtype) {
    case QC_DT_I8:
    case QC_DT_U8:
    case QC_DT_I16:
    case QC_DT_U16:
    case QC_DT_I32:
    case QC_DT_U32:
    case QC_DT_I64:
    case QC_DT_U64:
    case QC_DT_BOOL:
        return true;
    default:
        return false;
    }
}

int qc_hf_prequant_tensor(const char *folder, const qc_tensor_info *info, qc_err *err)
{
    static const struct {
        const char *suffix, *method;
    } table[] = {
        {".qweight", "GPTQ or AWQ"},
        {".qzeros", "GPTQ or AWQ"},
        {".g_idx", "GPTQ"},
        {".scales", "GPTQ, AWQ or MLX"},
        {".weight_packed", "compressed-tensors"},
        {".weight_scale", "compressed-tensors or FP8"},
        {".SCB", "bitsandbytes INT8"},
        {".weight.absmax", "bitsandbytes 4 bit"},
        {"_proj_blocks", "MXFP4"},
    };
    const char *method = NULL;
    char text[48];
    for (size_t i = 0; i < sizeof table / sizeof table[0] && !method; i++)
        if (ends_with(info->name, table[i].suffix))
            method = table[i].method;
    const char *dtype = qc_dtype_name(info->dtype);
    if (!method && info->dtype != QC_DT_F8_E4M3 && dtype[0] == 'F' && qc_dtype_bits(info->dtype) <= 8) {
        snprintf(text, sizeof text, "%s weights", dtype);
        method = text;
    }
    if (!method && info->n_dims >= 2 && is_integer(info->dtype) && ends_with(info->name, ".weight")) {
        snprintf(text, sizeof text, "%s weights without a description", dtype);
        method = text;
    }
    if (!method)
        return QC_OK;
    return qc_fail(err, QC_E_UNSUPPORTED,
                   "%s: checkpoint is already quantized (%s, by tensor \"%.200s\"); an unquantized "
                   "one is expected",
                   folder, method, info->name);
}
