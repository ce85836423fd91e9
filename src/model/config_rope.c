/* Rotary embedding settings: rope_theta with rope_scaling (classic) or rope_parameters (newer), one result.
 */
#include "config_internal.h"

#include <math.h>
#include <string.h>

/* Keys of a rope object; a kind reads those whose bit it has. */
enum {
    K_LINEAR = 1 << QC_ROPE_LINEAR,
    K_DYNAMIC = 1 << QC_ROPE_DYNAMIC,
    K_LONGROPE = 1 << QC_ROPE_LONGROPE,
    K_YARN = 1 << QC_ROPE_YARN,
    K_LLAMA3 = 1 << QC_ROPE_LLAMA3,
    K_ANY = ~0
};

static const struct {
    const char *key;
    int kinds;
} rope_keys[] = {
    {"rope_type", K_ANY},
    {"type", K_ANY},
    {"rope_theta", K_ANY},
    {"partial_rotary_factor", K_ANY},
    {"original_max_position_embeddings", K_ANY}, /* newer files write it for every kind */
    {"finetuned", K_ANY},                        /* a remark about training */
    {"factor", K_LINEAR | K_DYNAMIC | K_YARN | K_LLAMA3 | K_LONGROPE},
    {"low_freq_factor", K_LLAMA3},
    {"high_freq_factor", K_LLAMA3},
    {"attention_factor", K_YARN | K_LONGROPE},
    {"short_factor", K_LONGROPE},
    {"long_factor", K_LONGROPE},
    {"beta_fast", K_YARN},
    {"beta_slow", K_YARN},
    {"mscale", K_YARN},
    {"mscale_all_dim", K_YARN},
    {"truncate", K_YARN},
};

static int read_kind(qc_config_reader *r, const cJSON *object, qc_rope_kind *ret)
{
    static const struct {
        const char *name;
        qc_rope_kind kind;
    } kinds[] = {{"default", QC_ROPE_DEFAULT}, {"linear", QC_ROPE_LINEAR}, {"dynamic", QC_ROPE_DYNAMIC},
                 {"yarn", QC_ROPE_YARN},       {"llama3", QC_ROPE_LLAMA3}, {"longrope", QC_ROPE_LONGROPE}};
    bool phi3 = qc_family_reads(r->family, "original_max_position_embeddings");
    const char *name = NULL, *old_name = NULL;
    QC_TRY(qc_config_string(r, object, "rope_type", &name));
    QC_TRY(qc_config_string(r, object, "type", &old_name));
    if (name && old_name && strcmp(name, old_name) != 0)
        return qc_fail(r->err, QC_E_INPUT, "%s: rope_type is \"%s\" but type is \"%s\"", r->file, name,
                       old_name);
    name = name ? name : old_name ? old_name : "default";
    if (phi3 && (strcmp(name, "su") == 0 || strcmp(name, "yarn") == 0))
        name = "longrope"; /* what its early files called it */
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(kinds[i].name, name) == 0) {
            *ret = kinds[i].kind;
            return QC_OK;
        }
    return qc_fail(
        r->err, QC_E_UNSUPPORTED,
        "%s: rope_type \"%s\" is not supported; expected default, linear, dynamic, llama3, longrope "
        "or yarn",
        r->file, name);
}

static int check_rope_keys(qc_config_reader *r, const cJSON *object, qc_rope_kind kind)
{
    for (const cJSON *item = object->child; item; item = item->next) {
        bool known = cJSON_IsNull(item);
        for (size_t i = 0; i < sizeof rope_keys / sizeof rope_keys[0]; i++)
            known =
                known || (strcmp(rope_keys[i].key, item->string) == 0 && (rope_keys[i].kinds & 1 << kind));
        if (!known)
            return qc_fail(r->err, QC_E_UNSUPPORTED,
                           "%s: field \"%s\" of the rope settings is not known for this rope_type", r->file,
                           item->string);
    }
    return QC_OK;
}

static int positive(qc_config_reader *r, const cJSON *object, const char *key, double absent, double *ret)
{
    QC_TRY(qc_config_number(r, object, key, absent, ret, NULL));
    if (isnan(*ret))
        return qc_fail(r->err, QC_E_INPUT, "%s: rope settings lack \"%s\"", r->file, key);
    if (*ret <= 0)
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is %g, expected a number above 0", r->file, key, *ret);
    return QC_OK;
}

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

/* Peng et al. 2023, 3.4: a given attention_factor is used as it is, otherwise 0.1 ln(factor) + 1, or the
 * quotient of DeepSeek's two mscale fields. */
static int read_yarn(qc_config_reader *r, const cJSON *object, qc_rope_config *rope)
{
    bool given = false, has_m = false, has_all = false;
    double mscale = 0, mscale_all = 0;
    QC_TRY(positive(r, object, "beta_fast", 32, &rope->beta_fast));
    QC_TRY(positive(r, object, "beta_slow", 1, &rope->beta_slow));
    QC_TRY(qc_config_bool(r, object, "truncate", true, &rope->truncate));
    QC_TRY(qc_config_number(r, object, "mscale", 0, &mscale, &has_m));
    QC_TRY(qc_config_number(r, object, "mscale_all_dim", 0, &mscale_all, &has_all));
    QC_TRY(qc_config_number(r, object, "attention_factor", 0, &rope->attention_factor, &given));
    if (rope->factor < 1 || rope->theta <= 1 || rope->beta_fast < rope->beta_slow)
        return qc_fail(
            r->err, QC_E_INPUT,
            "%s: yarn needs factor >= 1, rope_theta > 1 and beta_fast >= beta_slow, got %g, %g, %g, %g",
            r->file, rope->factor, rope->theta, rope->beta_fast, rope->beta_slow);
    if (given && rope->attention_factor <= 0)
        return qc_fail(r->err, QC_E_INPUT, "%s: attention_factor is %g, expected a number above 0", r->file,
                       rope->attention_factor);
    bool quotient = has_m && has_all && mscale != 0 && mscale_all != 0;
    if (!given)
        rope->attention_factor =
            quotient ? yarn_mscale(rope->factor, mscale) / yarn_mscale(rope->factor, mscale_all)
                     : yarn_mscale(rope->factor, 1);
    double implied = (double)r->out->max_positions / (double)rope->original_max_positions;
    if (fabs(implied - rope->factor) > 1e-6 * rope->factor)
        return qc_config_note(
            r, QC_LOG_INFO,
            "%s: yarn factor %g is used; max_position_embeddings / original_max_position_embeddings is %g",
            r->file, rope->factor, implied);
    return QC_OK;
}

/* The share of a head that rotates: its first elements, an even number of them. */
static int read_rotary_part(qc_config_reader *r, const cJSON *object, qc_rope_config *rope)
{
    bool reads = qc_family_reads(r->family, "partial_rotary_factor");
    double part = 1;
    if (reads)
        QC_TRY(positive(r, r->json, "partial_rotary_factor", 1, &part));
    QC_TRY(positive(r, object, "partial_rotary_factor", part, &part));
    if (part > 1 || (part != 1 && !reads))
        return qc_fail(r->err, QC_E_UNSUPPORTED,
                       "%s: partial_rotary_factor %g is not supported for %s; expected 1", r->file, part,
                       r->family->model_type);
    r->out->rotary_dim = (int64_t)((double)r->out->head_dim * part);
    rope->partial_rotary_factor = part;
    if (r->out->rotary_dim < 2 || r->out->rotary_dim % 2 != 0)
        return qc_fail(r->err, QC_E_INPUT, "%s: partial_rotary_factor %g of head_dim %lld is no even number",
                       r->file, part, (long long)r->out->head_dim);
    return QC_OK;
}

/* Length of the training that the scaling starts from. Dynamic scaling starts from max_position_embeddings,
 * so another number beside it would be obeyed by some and ignored by others. */
static int read_original(qc_config_reader *r, const cJSON *object, qc_rope_config *rope)
{
    static const char key[] = "original_max_position_embeddings";
    int64_t original = r->out->max_positions;
    if (qc_family_reads(r->family, key))
        QC_TRY(qc_config_int(r, r->json, key, original, 1, INT32_MAX, &original));
    QC_TRY(qc_config_int(r, object, key, original, 1, INT32_MAX, &rope->original_max_positions));
    if (rope->kind == QC_ROPE_DYNAMIC && rope->original_max_positions != r->out->max_positions)
        return qc_fail(
            r->err, QC_E_UNSUPPORTED,
            "%s: \"%s\" %lld beside max_position_embeddings %lld is not supported for dynamic scaling",
            r->file, key, (long long)rope->original_max_positions, (long long)r->out->max_positions);
    if (rope->kind == QC_ROPE_DYNAMIC && r->out->rotary_dim < 4)
        return qc_fail(r->err, QC_E_UNSUPPORTED, "%s: dynamic scaling of heads of %lld elements", r->file,
                       (long long)r->out->rotary_dim);
    return QC_OK;
}

static int read_factors(qc_config_reader *r, const cJSON *object, const char *key,
                        double ret[QC_ROPE_FACTORS])
{
    const cJSON *list = qc_json_get(object, key), *item = list ? list->child : NULL;
    int64_t n = r->out->rotary_dim / 2;
    if (n > QC_ROPE_FACTORS)
        return qc_fail(r->err, QC_E_UNSUPPORTED, "%s: longrope over %lld pairs, at most %d are supported",
                       r->file, (long long)n, QC_ROPE_FACTORS);
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != n)
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is not a list of %lld numbers", r->file, key,
                       (long long)n);
    for (int64_t i = 0; i < n; i++, item = item->next) {
        ret[i] = cJSON_IsNumber(item) ? item->valuedouble : 0;
        if (!(ret[i] > 0) || isinf(ret[i]))
            return qc_fail(r->err, QC_E_INPUT, "%s: entry %lld of \"%s\" is not a number above 0", r->file,
                           (long long)i, key);
    }
    return QC_OK;
}

/* LongRoPE (Ding et al. 2024) as Phi-3 uses it: cos and sin grow by sqrt(1 + ln(stretch) / ln(original)),
 * whatever the length of the sequence, unless attention_factor says otherwise. */
static int read_longrope(qc_config_reader *r, const cJSON *object, qc_rope_config *rope)
{
    double stretch = (double)r->out->max_positions / (double)rope->original_max_positions, implied = 1;
    QC_TRY(read_factors(r, object, "short_factor", rope->short_factors));
    QC_TRY(read_factors(r, object, "long_factor", rope->long_factors));
    QC_TRY(positive(r, object, "factor", stretch, &rope->factor));
    if (rope->factor > 1 && rope->original_max_positions < 2)
        return qc_fail(r->err, QC_E_INPUT, "%s: longrope from an original length of 1", r->file);
    if (rope->factor > 1)
        implied = sqrt(1 + log(rope->factor) / log((double)rope->original_max_positions));
    return positive(r, object, "attention_factor", implied, &rope->attention_factor);
}

/* One rope object with its own theta, or the theta of the caller if it has none. */
static int read_rope_object(qc_config_reader *r, const cJSON *object, double theta, qc_rope_config *rope)
{
    *rope = (qc_rope_config){.attention_factor = 1, .factor = 1, .truncate = true};
    if (!cJSON_IsObject(object))
        return qc_fail(r->err, QC_E_INPUT, "%s: rope settings are not an object", r->file);
    QC_TRY(read_kind(r, object, &rope->kind));
    QC_TRY(check_rope_keys(r, object, rope->kind));
    QC_TRY(positive(r, object, "rope_theta", theta, &rope->theta));
    QC_TRY(read_rotary_part(r, object, rope));
    if (rope->kind == QC_ROPE_DEFAULT)
        return QC_OK;
    QC_TRY(read_original(r, object, rope));
    if (rope->kind == QC_ROPE_LONGROPE)
        return read_longrope(r, object, rope);
    QC_TRY(positive(r, object, "factor", NAN, &rope->factor));
    if (rope->kind == QC_ROPE_DYNAMIC && rope->factor < 1)
        return qc_fail(r->err, QC_E_INPUT, "%s: dynamic scaling by %g, expected a factor of at least 1",
                       r->file, rope->factor);
    if (rope->kind == QC_ROPE_YARN)
        return read_yarn(r, object, rope);
    if (rope->kind == QC_ROPE_LLAMA3) {
        QC_TRY(positive(r, object, "low_freq_factor", NAN, &rope->low_freq_factor));
        QC_TRY(positive(r, object, "high_freq_factor", NAN, &rope->high_freq_factor));
        if (rope->low_freq_factor >= rope->high_freq_factor)
            return qc_fail(r->err, QC_E_INPUT, "%s: low_freq_factor %g is not below high_freq_factor %g",
                           r->file, rope->low_freq_factor, rope->high_freq_factor);
    }
    return QC_OK;
}

static bool same_rope(const qc_rope_config *a, const qc_rope_config *b)
{
    return a->kind == b->kind && a->theta == b->theta && a->factor == b->factor &&
           (a->kind == QC_ROPE_DEFAULT || a->kind == QC_ROPE_LINEAR ||
            a->original_max_positions == b->original_max_positions) &&
           a->low_freq_factor == b->low_freq_factor && a->high_freq_factor == b->high_freq_factor &&
           a->beta_fast == b->beta_fast && a->beta_slow == b->beta_slow &&
           a->attention_factor == b->attention_factor && a->truncate == b->truncate &&
           memcmp(a->short_factors, b->short_factors, sizeof a->short_factors) == 0 &&
           memcmp(a->long_factors, b->long_factors, sizeof a->long_factors) == 0;
}

static const cJSON empty_object = {.type = cJSON_Object};

/* rope_parameters by layer type. Layers that slide have their own settings in some families; in the others
 * all layers rotate alike, so both must agree. */
static int read_by_type(qc_config_reader *r, const cJSON *parameters, double theta, double local_theta,
                        qc_rope_config *ret, qc_rope_config *ret_local)
{
    const char *const types[] = {"full_attention", "sliding_attention"};
    const cJSON *objects[] = {qc_json_get(parameters, types[0]), qc_json_get(parameters, types[1])};
    bool own = r->out->has_local_rope;
    for (const cJSON *item = parameters->child; item; item = item->next)
        if (strcmp(item->string, types[0]) != 0 && strcmp(item->string, types[1]) != 0)
            return qc_fail(r->err, QC_E_UNSUPPORTED,
                           "%s: rope_parameters for layer type \"%s\" are not supported", r->file,
                           item->string);
    for (int i = 0; i < 2; i++)
        if (!objects[i])
            objects[i] = own || !objects[1 - i] ? &empty_object : objects[1 - i];
    QC_TRY(read_rope_object(r, objects[0], theta, ret));
    QC_TRY(read_rope_object(r, objects[1], own ? local_theta : theta, ret_local));
    if (!own && !same_rope(ret, ret_local))
        return qc_fail(r->err, QC_E_UNSUPPORTED,
                       "%s: rope_parameters that differ by layer type are not supported for %s", r->file,
                       r->family->model_type);
    return QC_OK;
}

static bool has_theta(const cJSON *parameters)
{
    if (!parameters)
        return false;
    if (parameters->child && cJSON_IsObject(parameters->child))
        return qc_json_get(parameters->child, "rope_theta") != NULL;
    return qc_json_get(parameters, "rope_theta") != NULL;
}

/* A base of the top level: *ret_given says whether it stands there. */
static int read_theta(qc_config_reader *r, const char *key, double class_default, double *ret,
                      bool *ret_given)
{
    QC_TRY(qc_config_number(r, r->json, key, class_default, ret, ret_given));
    if (*ret <= 0)
        return qc_fail(r->err, QC_E_INPUT, "%s: %s is %g, expected a number above 0", r->file, key, *ret);
    return QC_OK;
}

static int check_theta(qc_config_reader *r, const char *key, bool given, double theta, const char *where,
                       double other)
{
    if (!given || theta == other)
        return QC_OK;
    return qc_fail(r->err, QC_E_INPUT, "%s: %s is %g at the top level but %g in %s", r->file, key, theta,
                   other, where);
}

int qc_config_read_rope(qc_config_reader *r)
{
    const cJSON *scaling = qc_json_get(r->json, "rope_scaling"),
                *parameters = qc_json_get(r->json, "rope_parameters");
    const qc_class_defaults *d = &r->family->defaults;
    qc_model_config *c = r->out;
    qc_rope_config classic = {0}, newer = {0};
    double theta = 0, local_theta = d->local_rope_theta;
    bool given = false, local_given = false;
    c->has_local_rope = d->local_rope_theta > 0;
    QC_TRY(read_theta(r, "rope_theta", d->rope_theta, &theta, &given));
    if (c->has_local_rope)
        QC_TRY(read_theta(r, "rope_local_base_freq", d->local_rope_theta, &local_theta, &local_given));
    if (!given && !has_theta(parameters) && !has_theta(scaling))
        QC_TRY(qc_config_note(r, QC_LOG_WARN, "%s: rope_theta is absent, class default %g", r->file, theta));
    if (c->has_local_rope && !local_given && !parameters)
        QC_TRY(qc_config_note(r, QC_LOG_WARN, "%s: rope_local_base_freq is absent, class default %g", r->file,
                              local_theta));
    QC_TRY(read_rope_object(r, scaling ? scaling : &empty_object, theta, &classic));
    QC_TRY(check_theta(r, "rope_theta", given, theta, "rope_scaling", classic.theta));
    c->rope = classic;
    if (c->has_local_rope)
        QC_TRY(read_rope_object(r, &empty_object, local_theta, &c->local_rope));
    if (!parameters)
        return QC_OK;
    if (c->has_local_rope || (parameters->child && cJSON_IsObject(parameters->child)))
        QC_TRY(read_by_type(r, parameters, theta, local_theta, &newer, &c->local_rope));
    else
        QC_TRY(read_rope_object(r, parameters, theta, &newer));
    QC_TRY(check_theta(r, "rope_theta", given, theta, "rope_parameters", newer.theta));
    QC_TRY(check_theta(r, "rope_local_base_freq", local_given, local_theta, "rope_parameters",
                       c->local_rope.theta));
    if (scaling && (classic.theta = newer.theta, !same_rope(&classic, &newer)))
        return qc_fail(r->err, QC_E_INPUT, "%s: rope_scaling and rope_parameters disagree", r->file);
    c->rope = newer;
    return QC_OK;
}
