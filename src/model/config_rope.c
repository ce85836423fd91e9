/* Rotary embedding settings: rope_theta with rope_scaling (classic) or rope_parameters (newer), one result.
 */
#include "config_internal.h"

#include <math.h>
#include <string.h>

/* Keys of a rope object; a kind reads those whose bit it has. */
enum {
    K_LINEAR = 1 << QC_ROPE_LINEAR,
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
    {"factor", K_LINEAR | K_YARN | K_LLAMA3},
    {"low_freq_factor", K_LLAMA3},
    {"high_freq_factor", K_LLAMA3},
    {"attention_factor", K_YARN},
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
    } kinds[] = {{"default", QC_ROPE_DEFAULT},
                 {"linear", QC_ROPE_LINEAR},
                 {"yarn", QC_ROPE_YARN},
                 {"llama3", QC_ROPE_LLAMA3}};
    const char *name = NULL, *old_name = NULL;
    QC_TRY(qc_config_string(r, object, "rope_type", &name));
    QC_TRY(qc_config_string(r, object, "type", &old_name));
    if (name && old_name && strcmp(name, old_name) != 0)
        return qc_fail(r->err, QC_E_INPUT, "%s: rope_type is \"%s\" but type is \"%s\"", r->file, name,
                       old_name);
    name = name ? name : old_name ? old_name : "default";
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(kinds[i].name, name) == 0) {
            *ret = kinds[i].kind;
            return QC_OK;
        }
    return qc_fail(r->err, QC_E_UNSUPPORTED,
                   "%s: rope_type \"%s\" is not supported; expected default, linear, llama3 or yarn", r->file,
                   name);
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

/* One rope object with its own theta, or the theta of the caller if it has none. */
static int read_rope_object(qc_config_reader *r, const cJSON *object, double theta, qc_rope_config *rope)
{
    *rope = (qc_rope_config){.attention_factor = 1, .factor = 1, .truncate = true};
    if (!cJSON_IsObject(object))
        return qc_fail(r->err, QC_E_INPUT, "%s: rope settings are not an object", r->file);
    QC_TRY(read_kind(r, object, &rope->kind));
    QC_TRY(check_rope_keys(r, object, rope->kind));
    QC_TRY(positive(r, object, "rope_theta", theta, &rope->theta));
    QC_TRY(positive(r, object, "partial_rotary_factor", 1, &rope->partial_rotary_factor));
    if (rope->partial_rotary_factor != 1)
        return qc_fail(r->err, QC_E_UNSUPPORTED,
                       "%s: partial_rotary_factor %g is not supported for %s; expected 1", r->file,
                       rope->partial_rotary_factor, r->family->model_type);
    if (rope->kind == QC_ROPE_DEFAULT)
        return QC_OK;
    QC_TRY(positive(r, object, "factor", NAN, &rope->factor));
    QC_TRY(qc_config_int(r, object, "original_max_position_embeddings", r->out->max_positions, 1, INT32_MAX,
                         &rope->original_max_positions));
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
           a->attention_factor == b->attention_factor && a->truncate == b->truncate;
}

/* rope_parameters: one object, or one per layer type; these families rotate all layers alike, so they must
 * agree. */
static int read_newer(qc_config_reader *r, const cJSON *parameters, double theta, qc_rope_config *ret)
{
    if (!parameters->child || !cJSON_IsObject(parameters->child))
        return read_rope_object(r, parameters, theta, ret);
    for (const cJSON *item = parameters->child; item; item = item->next) {
        qc_rope_config rope = {0};
        if (strcmp(item->string, "full_attention") != 0 && strcmp(item->string, "sliding_attention") != 0)
            return qc_fail(r->err, QC_E_UNSUPPORTED,
                           "%s: rope_parameters for layer type \"%s\" are not supported", r->file,
                           item->string);
        QC_TRY(read_rope_object(r, item, theta, &rope));
        if (item == parameters->child)
            *ret = rope;
        else if (!same_rope(&rope, ret))
            return qc_fail(r->err, QC_E_UNSUPPORTED,
                           "%s: rope_parameters that differ by layer type are not supported for %s", r->file,
                           r->family->model_type);
    }
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

int qc_config_read_rope(qc_config_reader *r)
{
    const cJSON *scaling = qc_json_get(r->json, "rope_scaling"),
                *parameters = qc_json_get(r->json, "rope_parameters");
    qc_rope_config classic = {0}, newer = {0};
    double theta = 0;
    bool given = false;
    QC_TRY(qc_config_number(r, r->json, "rope_theta", r->family->defaults.rope_theta, &theta, &given));
    if (theta <= 0)
        return qc_fail(r->err, QC_E_INPUT, "%s: rope_theta is %g, expected a number above 0", r->file, theta);
    if (!given && !has_theta(parameters) && !has_theta(scaling))
        QC_TRY(qc_config_note(r, QC_LOG_WARN, "%s: rope_theta is absent, class default %g", r->file, theta));
    static const cJSON empty = {.type = cJSON_Object};
    QC_TRY(read_rope_object(r, scaling ? scaling : &empty, theta, &classic));
    if (given && classic.theta != theta)
        return qc_fail(r->err, QC_E_INPUT, "%s: rope_theta is %g at the top level but %g in rope_scaling",
                       r->file, theta, classic.theta);
    if (!parameters) {
        r->out->rope = classic;
        return QC_OK;
    }
    QC_TRY(read_newer(r, parameters, theta, &newer));
    if (given && newer.theta != theta)
        return qc_fail(r->err, QC_E_INPUT, "%s: rope_theta is %g at the top level but %g in rope_parameters",
                       r->file, theta, newer.theta);
    if (scaling && (classic.theta = newer.theta, !same_rope(&classic, &newer)))
        return qc_fail(r->err, QC_E_INPUT, "%s: rope_scaling and rope_parameters disagree", r->file);
    r->out->rope = newer;
    return QC_OK;
}
