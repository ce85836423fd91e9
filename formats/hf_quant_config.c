#include "hf_quant_config.h"

#include "qc_alloc.h"
#include "qc_json.h"

#include <regex.h>
#include <string.h>

static bool is_empty(const cJSON *item)
{
    return !item || (cJSON_IsObject(item) && !item->child);
}

int qc_ct_config_check(const char *path, const cJSON *config, qc_err *err)
{
    static const char *const formats[] = {"pack-quantized", "int-quantized", "naive-quantized",
                                          "mixed-precision", "dense"};
    static const char *const empty[] = {"kv_cache_scheme", "transform_config"};
    const char *format = cJSON_GetStringValue(qc_json_get(config, "format"));
    bool known = false;
    for (size_t i = 0; format && i < sizeof formats / sizeof formats[0]; i++)
        known = known || strcmp(format, formats[i]) == 0;
    if (!known)
        return qc_fail(
            err, QC_E_UNSUPPORTED,
            "%s: config.json: format %.60s of compressed-tensors is not read (read are pack-quantized, "
            "int-quantized)",
            path, format ? format : "(none)");
    for (size_t i = 0; i < sizeof empty / sizeof empty[0]; i++)
        if (!is_empty(qc_json_get(config, empty[i])))
            return qc_fail(err, QC_E_UNSUPPORTED, "%s: config.json: %s of compressed-tensors is not read",
                           path, empty[i]);
    const char *sparsity =
        cJSON_GetStringValue(qc_json_get(qc_json_get(config, "sparsity_config"), "format"));
    if (sparsity && strcmp(sparsity, "dense") != 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: config.json: sparsity_config of format %.60s is not read",
                       path, sparsity);
    return QC_OK;
}

/* Does a target name the module? 2 by its name, 1 by its class, 0 not. */
static int match(const char *target, const char *module)
{
    if (strcmp(target, module) == 0)
        return 2;
    if (strncmp(target, "re:", 3) != 0)
        return strcmp(target, "Linear") == 0;
    regex_t re;
    char *anchored = qc_asprintf("^(%s)", target + 3); /* matches begin at the start of the name */
    bool hit = anchored && regcomp(&re, anchored, REG_EXTENDED | REG_NOSUB) == 0;
    if (hit) {
        hit = regexec(&re, module, 0, NULL, 0) == 0;
        regfree(&re);
    }
    qc_free(anchored);
    return hit ? 2 : 0;
}

static int read_acts(const char *path, const cJSON *acts, int *ret_bits, qc_err *err)
{
    const char *strategy = cJSON_GetStringValue(qc_json_get(acts, "strategy")),
               *type = cJSON_GetStringValue(qc_json_get(acts, "type"));
    int64_t bits = 0;
    if (!qc_json_int(qc_json_get(acts, "num_bits"), &bits) || bits != 8 || !type ||
        strcmp(type, "int") != 0 || !strategy || strcmp(strategy, "token") != 0 ||
        !cJSON_IsTrue(qc_json_get(acts, "dynamic")) || cJSON_IsFalse(qc_json_get(acts, "symmetric")))
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: config.json: input_activations of compressed-tensors are read as symmetric INT8, "
                       "dynamic, one scale per token",
                       path);
    *ret_bits = 8;
    return QC_OK;
}

int qc_ct_config_acts(const char *path, const cJSON *config, const char *name, int module_bytes,
                      int *ret_bits, qc_err *err)
{
    const cJSON *group, *target, *found = NULL;
    int best = 0;
    char *module = qc_strndup(name, (size_t)module_bytes);
    if (!module)
        return qc_fail_nomem(err, name, (unsigned long long)module_bytes);
    cJSON_ArrayForEach(group, qc_json_get(config, "config_groups"))
        cJSON_ArrayForEach(target, qc_json_get(group, "targets"))
    {
        int how = cJSON_IsString(target) ? match(target->valuestring, module) : 0;
        if (how > best) {
            best = how;
            found = group;
        }
    }
    qc_free(module);
    if (!found)
        return qc_fail(err, QC_E_INPUT, "%s: config.json: no group of compressed-tensors names %.*s", path,
                       module_bytes, name);
    const cJSON *acts = qc_json_get(found, "input_activations");
    *ret_bits = 0;
    return acts ? read_acts(path, acts, ret_bits, err) : QC_OK;
}
