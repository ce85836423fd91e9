/* The decision goes through the rules in a fixed order: target's default, overrides, skip list, group rule.
 */
#include "policy.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#define GROUP_MIN      16
#define GROUP_MAX      1024
#define GROUP_ALIGN    8    /* packed tiles hold 4 columns a step and kernels take two steps at once */
#define NAME_MAX_BYTES 1024 /* longer names are compared as they are */

qc_policy qc_policy_defaults(void)
{
    qc_policy p = {
        .weights = {.grid = {.kind = QC_GRID_AFFINE,
                             .bits = 4,
                             .symmetric = true,
                             .group_elems = 128,
                             .scale_dtype = QC_DT_F16},
                    .sym_rule = QC_SYM_FULL_RANGE,
                    .search = QC_SEARCH_MSE},
        .quantize_embedding = true,
        .group_fallback = QC_GROUP_ERROR,
    };
    p.embedding = p.weights;
    p.embedding.grid.bits = 8;
    p.embedding.grid.group_elems = -1;
    return p;
}

static bool matches(const char *pattern, const char *name)
{
    static const char suffix[] = ".weight";
    if (fnmatch(pattern, name, 0) == 0)
        return true;
    size_t n = strlen(name), n_suffix = sizeof suffix - 1;
    if (n <= n_suffix || n >= NAME_MAX_BYTES || strcmp(name + n - n_suffix, suffix) != 0)
        return false;
    char stem[NAME_MAX_BYTES];
    memcpy(stem, name, n - n_suffix);
    stem[n - n_suffix] = 0;
    return fnmatch(pattern, stem, 0) == 0;
}

/* Largest admissible divisor of n_cols up to `group`, 0 if there is none. */
static int64_t smaller_group(int64_t n_cols, int64_t group)
{
    int64_t g = (group < n_cols ? group : n_cols) / GROUP_ALIGN * GROUP_ALIGN;
    for (; g >= GROUP_MIN; g -= GROUP_ALIGN)
        if (n_cols % g == 0)
            return g;
    return 0;
}

static int refuse_group(const char *name, int64_t n_cols, int64_t group, qc_err *err)
{
    int64_t fits = smaller_group(n_cols, group);
    char hint[32] = "";
    if (fits)
        snprintf(hint, sizeof hint, "%lld or ", (long long)fits);
    return qc_fail(
        err, QC_E_UNSUPPORTED,
        "tensor '%s': group %lld does not divide its %lld inputs; expected a group that does, as %schannel "
        "(--group for linear layers), or a rule for such tensors, as --group-fallback %s",
        name, (long long)group, (long long)n_cols, hint, fits ? "smaller" : "channel");
}

/* Make the group of *spec fit n_cols by the policy's rule. */
static int fit_group(const qc_policy *policy, const char *name, int64_t n_cols, qc_quant_spec *spec,
                     bool *quantize, bool *fallback, qc_err *err)
{
    int64_t group = spec->grid.group_elems;
    if (group == -1) {
        spec->grid.group_elems = n_cols;
        return QC_OK;
    }
    if (group < GROUP_MIN || group > GROUP_MAX || group % GROUP_ALIGN)
        return qc_fail(err, QC_E_USAGE,
                       "tensor '%s': group %lld, expected a multiple of %d in %d .. %d or one per channel",
                       name, (long long)group, GROUP_ALIGN, GROUP_MIN, GROUP_MAX);
    if (n_cols % group == 0)
        return QC_OK;
    switch (policy->group_fallback) {
    case QC_GROUP_CHANNEL:
        spec->grid.group_elems = n_cols;
        break;
    case QC_GROUP_SMALLER:
        spec->grid.group_elems = smaller_group(n_cols, group);
        if (!spec->grid.group_elems)
            return refuse_group(name, n_cols, group, err);
        break;
    case QC_GROUP_KEEP:
        *quantize = false;
        break;
    default:
        return refuse_group(name, n_cols, group, err);
    }
    *fallback = true;
    return QC_OK;
}

static void apply(const qc_override *o, qc_quant_spec *spec, bool *quantize)
{
    if (o->bits) {
        spec->grid.bits = o->bits;
        *quantize = true;
    }
    if (o->group)
        spec->grid.group_elems = o->group;
    if (o->symmetric >= 0)
        spec->grid.symmetric = o->symmetric;
}

int qc_policy_decide(const qc_policy *policy, const char *name, qc_target target, int64_t n_rows,
                     int64_t n_cols, qc_quant_spec *ret_spec, bool *ret_quantize, bool *ret_fallback,
                     qc_err *err)
{
    qc_quant_spec spec = target == QC_TARGET_LINEAR ? policy->weights : policy->embedding;
    bool quantize = target == QC_TARGET_LINEAR || policy->quantize_embedding, fallback = false;

    for (int i = 0; i < policy->n_overrides; i++)
        if (matches(policy->overrides[i].match, name))
            apply(&policy->overrides[i], &spec, &quantize);
    for (int i = 0; i < policy->n_skip && quantize; i++)
        quantize = !matches(policy->skip[i], name);
    if (spec.grid.bits == 16 || n_rows == 0 || n_cols == 0)
        quantize = false;
    if (quantize && (spec.grid.bits < 2 || spec.grid.bits > 8))
        return qc_fail(err, QC_E_USAGE, "tensor '%s': %d bits, expected 2 .. 8, or 16 to leave it as it is",
                       name, spec.grid.bits);
    if (quantize)
        QC_TRY(fit_group(policy, name, n_cols, &spec, &quantize, &fallback, err));

    if (quantize)
        *ret_spec = spec;
    *ret_quantize = quantize;
    *ret_fallback = fallback;
    return QC_OK;
}

void qc_policy_settled(const qc_policy *policy, const char *name, bool *ret_bits, bool *ret_group)
{
    *ret_bits = *ret_group = false;
    for (int i = 0; i < policy->n_overrides; i++)
        if (matches(policy->overrides[i].match, name)) {
            *ret_bits = *ret_bits || policy->overrides[i].bits;
            *ret_group = *ret_group || policy->overrides[i].group;
        }
    for (int i = 0; i < policy->n_skip; i++)
        *ret_bits = *ret_bits || matches(policy->skip[i], name);
}

static bool matches_any(const char *pattern, const char *const *names, int64_t n_names)
{
    for (int64_t i = 0; i < n_names; i++)
        if (matches(pattern, names[i]))
            return true;
    return false;
}

int qc_policy_check_used(const qc_policy *policy, const char *const *names, int64_t n_names, qc_err *err)
{
    for (int i = 0; i < policy->n_overrides; i++)
        if (!matches_any(policy->overrides[i].match, names, n_names))
            return qc_fail(err, QC_E_USAGE, "override '%s' matches no weight matrix of the model",
                           policy->overrides[i].match);
    for (int i = 0; i < policy->n_skip; i++)
        if (!matches_any(policy->skip[i], names, n_names))
            return qc_fail(err, QC_E_USAGE, "skip pattern '%s' matches no weight matrix of the model",
                           policy->skip[i]);
    return QC_OK;
}
