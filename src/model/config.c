#include "config_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MAX_LAYERS 10000
#define MAX_HEADS  65536

int qc_config_note(qc_config_reader *r, qc_log_level level, const char *fmt, ...)
{
    char text[QC_ERR_MSG_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    qc_log(level, "%s", text);
    return qc_buf_printf(&r->notes, r->err, "%s%s", r->notes.n_bytes ? "\n" : "", text);
}

int qc_config_int(qc_config_reader *r, const cJSON *object, const char *key, int64_t absent, int64_t lo,
                  int64_t hi, int64_t *ret)
{
    const cJSON *item = qc_json_get(object, key);
    int64_t value;
    if (!item) {
        *ret = absent;
        return QC_OK;
    }
    if (!qc_json_int(item, &value))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is not an integer", r->file, key);
    if (value < lo || value > hi)
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is %lld, expected %lld to %lld", r->file, key,
                       (long long)value, (long long)lo, (long long)hi);
    *ret = value;
    return QC_OK;
}

int qc_config_number(qc_config_reader *r, const cJSON *object, const char *key, double absent, double *ret,
                     bool *ret_present)
{
    const cJSON *item = qc_json_get(object, key);
    if (item && (!cJSON_IsNumber(item) || !isfinite(item->valuedouble)))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is not a finite number", r->file, key);
    *ret = item ? item->valuedouble : absent;
    if (ret_present)
        *ret_present = item != NULL;
    return QC_OK;
}

int qc_config_bool(qc_config_reader *r, const cJSON *object, const char *key, bool absent, bool *ret)
{
    const cJSON *item = qc_json_get(object, key);
    if (item && !cJSON_IsBool(item))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is not true or false", r->file, key);
    *ret = item ? cJSON_IsTrue(item) : absent;
    return QC_OK;
}

int qc_config_string(qc_config_reader *r, const cJSON *object, const char *key, const char **ret)
{
    const cJSON *item = qc_json_get(object, key);
    if (item && !cJSON_IsString(item))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is not a string", r->file, key);
    *ret = item ? item->valuestring : NULL;
    return QC_OK;
}

bool qc_config_has(const qc_config_reader *r, const char *key)
{
    return cJSON_GetObjectItemCaseSensitive(r->json, key) != NULL;
}

int qc_config_count(qc_config_reader *r, const char *key, int64_t class_default, int64_t hi, int64_t *ret)
{
    QC_TRY(qc_config_int(r, r->json, key, class_default, 1, hi, ret));
    if (!qc_json_get(r->json, key))
        return qc_config_note(r, QC_LOG_WARN, "%s: %s is absent, class default %lld", r->file, key,
                              (long long)class_default);
    return QC_OK;
}

static int refuse_family(qc_config_reader *r, const char *model_type)
{
    char list[256] = "";
    for (int i = 0; qc_family_at(i); i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "",
                 qc_family_at(i)->model_type);
    return qc_fail(r->err, QC_E_UNSUPPORTED, "%s: model_type \"%s\" is not supported; expected one of %s",
                   r->file, model_type, list);
}

/* The document may wrap the text model's settings in text_config; then those count. */
static int find_family(qc_config_reader *r)
{
    const cJSON *inner = qc_json_get(r->outer, "text_config");
    const char *outer_type = NULL, *type = NULL;
    if (!cJSON_IsObject(r->outer) || (inner && !cJSON_IsObject(inner)))
        return qc_fail(r->err, QC_E_INPUT, "%s: %s is not an object", r->file,
                       inner ? "\"text_config\"" : "the document");
    r->json = inner ? inner : r->outer;
    r->out->wrapped = inner != NULL;
    QC_TRY(qc_config_string(r, r->outer, "model_type", &outer_type));
    QC_TRY(qc_config_string(r, r->json, "model_type", &type));
    r->wrapper = outer_type ? qc_wrapper_find(outer_type) : NULL;
    if (r->wrapper && !inner)
        return qc_fail(r->err, QC_E_INPUT, "%s: model_type %s without \"text_config\"", r->file, outer_type);
    if (!type && (!outer_type || r->wrapper))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"model_type\" is missing%s", r->file,
                       r->wrapper ? " in \"text_config\"" : "");
    const char *refused = outer_type && !r->wrapper && !qc_family_find(outer_type) ? outer_type
                          : type && !qc_family_find(type)                          ? type
                                                                                   : NULL;
    if (refused)
        return refuse_family(r, refused);
    r->family = r->out->family = qc_family_find(type ? type : outer_type);
    return QC_OK;
}

/* model_type, class_name: what the object may say. */
static int check_class(qc_config_reader *r, const cJSON *object, const char *model_type,
                       const char *class_name)
{
    const cJSON *list = qc_json_get(object, "architectures");
    const cJSON *first = cJSON_IsArray(list) ? list->child : NULL;
    if (!list || (cJSON_IsArray(list) && !first))
        return QC_OK;
    if (!cJSON_IsString(first))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"architectures\" is not a list of names", r->file);
    if (strcmp(first->valuestring, class_name) != 0)
        return qc_fail(r->err, QC_E_UNSUPPORTED,
                       "%s: architecture \"%s\" of model_type %s is not supported; expected %s", r->file,
                       first->valuestring, model_type, class_name);
    return QC_OK;
}

/* In a wrapper the class of the text model follows from its model_type, whatever its architectures say. */
static int check_classes(qc_config_reader *r)
{
    if (r->wrapper)
        return check_class(r, r->outer, r->wrapper->model_type, r->wrapper->class_name);
    QC_TRY(check_class(r, r->outer, r->family->model_type, r->family->class_name));
    return check_class(r, r->json, r->family->model_type, r->family->class_name);
}

static int read_heads(qc_config_reader *r)
{
    const qc_class_defaults *d = &r->family->defaults;
    qc_model_config *c = r->out;
    QC_TRY(qc_config_count(r, "num_attention_heads", d->n_heads, MAX_HEADS, &c->n_heads));
    bool class_kv =
        d->n_kv_heads > 0 && c->n_heads % d->n_kv_heads == 0 && !qc_config_has(r, "num_key_value_heads");
    QC_TRY(qc_config_int(r, r->json, "num_key_value_heads", class_kv ? d->n_kv_heads : c->n_heads, 1,
                         MAX_HEADS, &c->n_kv_heads));
    if (!qc_json_get(r->json, "num_key_value_heads"))
        QC_TRY(
            qc_config_note(r, QC_LOG_WARN, "%s: num_key_value_heads is %s, %s %lld", r->file,
                           qc_config_has(r, "num_key_value_heads") ? "null" : "absent",
                           class_kv ? "class default" : "as many as query heads:", (long long)c->n_kv_heads));
    if (c->n_heads % c->n_kv_heads != 0)
        return qc_fail(r->err, QC_E_INPUT,
                       "%s: num_key_value_heads is %lld, expected a divisor of num_attention_heads %lld",
                       r->file, (long long)c->n_kv_heads, (long long)c->n_heads);
    bool class_dim = d->head_dim > 0 && !qc_config_has(r, "head_dim");
    if (class_dim)
        QC_TRY(qc_config_note(r, QC_LOG_WARN, "%s: head_dim is absent, class default %lld", r->file,
                              (long long)d->head_dim));
    else if (!qc_json_get(r->json, "head_dim") && c->hidden % c->n_heads != 0)
        return qc_fail(
            r->err, QC_E_INPUT,
            "%s: hidden_size %lld is no multiple of num_attention_heads %lld and head_dim is not given",
            r->file, (long long)c->hidden, (long long)c->n_heads);
    QC_TRY(qc_config_int(r, r->json, "head_dim", class_dim ? d->head_dim : c->hidden / c->n_heads, 1,
                         MAX_HEADS, &c->head_dim));
    if (c->head_dim % 2 != 0)
        return qc_fail(r->err, QC_E_INPUT, "%s: head_dim is %lld, expected an even number", r->file,
                       (long long)c->head_dim);
    return QC_OK;
}

static int read_activation(qc_config_reader *r)
{
    static const struct {
        const char *name;
        qc_activation act;
    } acts[] = {{"silu", QC_ACT_SILU},
                {"swish", QC_ACT_SILU},
                {"gelu_pytorch_tanh", QC_ACT_GELU_TANH},
                {"gelu_new", QC_ACT_GELU_TANH}};
    const qc_family *f = r->family;
    const char *key = f->act_key ? f->act_key : "hidden_act", *name = NULL;
    QC_TRY(qc_config_string(r, r->json, key, &name));
    name = name ? name : f->defaults.act ? f->defaults.act : "silu";
    for (size_t i = 0; i < sizeof acts / sizeof acts[0]; i++)
        if (strcmp(name, acts[i].name) == 0) {
            r->out->act = acts[i].act;
            return QC_OK;
        }
    return qc_fail(r->err, QC_E_UNSUPPORTED,
                   "%s: %s \"%s\" is not supported; expected silu or gelu_pytorch_tanh", r->file, key, name);
}

/* A number that scales something: `neutral` if the family has no such field, above 0 if it is given. */
static int read_scale(qc_config_reader *r, const char *key, double neutral, double class_default, double *ret)
{
    *ret = neutral;
    if (!qc_family_reads(r->family, key))
        return QC_OK;
    bool given = false;
    double absent = qc_config_has(r, key) ? neutral : class_default; /* null switches off */
    QC_TRY(qc_config_number(r, r->json, key, absent, ret, &given));
    if (given && !(*ret >= 1e-30 && *ret <= 1e30))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is %g, expected 1e-30 to 1e30", r->file, key, *ret);
    if (!qc_config_has(r, key) && class_default != neutral)
        return qc_config_note(r, QC_LOG_WARN, "%s: %s is absent, class default %g", r->file, key, *ret);
    return QC_OK;
}

static int read_scales(qc_config_reader *r)
{
    const qc_class_defaults *d = &r->family->defaults;
    qc_model_config *c = r->out;
    double scalar = 0, attention = 0, attention_cap = 0, final_cap = 0, embedding = 1, residual = 1,
           logits = 1;
    QC_TRY(read_scale(r, "query_pre_attn_scalar", (double)c->head_dim, d->query_scalar, &scalar));
    QC_TRY(read_scale(r, "attention_multiplier", 1 / sqrt(scalar), 1, &attention));
    QC_TRY(read_scale(r, "attn_logit_softcapping", 0, d->attention_softcap, &attention_cap));
    QC_TRY(read_scale(r, "final_logit_softcapping", 0, d->final_softcap, &final_cap));
    QC_TRY(read_scale(r, "embedding_multiplier", 1, 1, &embedding));
    QC_TRY(read_scale(r, "residual_multiplier", 1, 1, &residual));
    QC_TRY(read_scale(r, "logits_scaling", 1, 1, &logits));
    c->norm_offset = r->family->norm_offset;
    c->attention_scale = (float)attention;
    c->attention_softcap = (float)attention_cap;
    c->final_softcap = (float)final_cap;
    c->embedding_scale = (float)(r->family->scaled_embedding ? sqrt((double)c->hidden) : embedding);
    c->residual_scale = (float)residual;
    c->logit_scale = (float)(1 / logits);
    return QC_OK;
}

static int read_flags(qc_config_reader *r)
{
    const qc_family *f = r->family;
    qc_model_config *c = r->out;
    bool attention_bias = false, out_bias = false, mlp_bias = false;
    double eps = 0;
    QC_TRY(qc_config_bool(r, r->json, "attention_bias", f->defaults.attention_bias, &attention_bias));
    QC_TRY(qc_config_bool(r, r->json, "attention_out_bias", false, &out_bias));
    QC_TRY(qc_config_bool(r, r->json, "mlp_bias", false, &mlp_bias));
    c->qkv_bias = f->qkv_bias == QC_BIAS_ALWAYS || (f->qkv_bias == QC_BIAS_BY_KEY && attention_bias);
    c->o_bias = f->o_bias == QC_BIAS_ALWAYS || (f->o_bias == QC_BIAS_BY_KEY && attention_bias) ||
                (f->o_bias == QC_BIAS_BY_OUT_KEY && out_bias);
    c->mlp_bias = f->mlp_bias == QC_BIAS_ALWAYS || (f->mlp_bias == QC_BIAS_BY_KEY && mlp_bias);
    c->qk_norm = f->qk_norm;
    QC_TRY(qc_config_number(r, r->json, "rms_norm_eps", f->defaults.rms_eps, &eps, NULL));
    if (eps < 0 || eps > 1)
        return qc_fail(r->err, QC_E_INPUT, "%s: \"rms_norm_eps\" is %g, expected 0 to 1", r->file, eps);
    c->rms_eps = (float)eps;
    const cJSON *tie_of = qc_json_get(r->json, "tie_word_embeddings") ? r->json : r->outer;
    QC_TRY(qc_config_bool(r, tie_of, "tie_word_embeddings", f->defaults.tied, &c->tied));
    if (!qc_json_get(tie_of, "tie_word_embeddings"))
        QC_TRY(qc_config_note(r, QC_LOG_WARN, "%s: tie_word_embeddings is absent, class default %s", r->file,
                              c->tied ? "true" : "false"));
    QC_TRY(read_scales(r));
    return read_activation(r);
}

static int64_t find_named(const qc_config_reader *r, const qc_name_form *form, qc_slot slot)
{
    char name[QC_NAME_BYTES];
    qc_full_name(form, r->family->names[slot], name);
    return r->src->find(r->src, name);
}

/* The table of embeddings, and with it the form of all names. */
static int64_t find_table(qc_config_reader *r)
{
    static const qc_slot slots[] = {QC_SLOT_EMBEDDING, QC_SLOT_HEAD}; /* a tied table may be the head alone */
    for (int k = 0; k < (r->out->tied ? 2 : 1); k++)
        for (int i = 0; i < (r->out->wrapped ? INT32_MAX : 1) && qc_name_form_at(i); i++) {
            int64_t tensor = find_named(r, qc_name_form_at(i), slots[k]);
            if (tensor < 0)
                continue;
            r->out->form = qc_name_form_at(i);
            return tensor;
        }
    return -1;
}

/* Where a wrapper and its text_config say different things about the head, its presence decides: both
 * readings are in use. */
static int settle_wrapped_tie(qc_config_reader *r)
{
    static const char key[] = "tie_word_embeddings";
    const cJSON *inner = qc_json_get(r->json, key), *outer = qc_json_get(r->outer, key);
    if (!inner || !outer || cJSON_IsTrue(inner) == cJSON_IsTrue(outer))
        return QC_OK;
    r->out->tied = find_named(r, r->out->form, QC_SLOT_HEAD) < 0;
    return qc_config_note(r, QC_LOG_WARN, "%s: %s is %s, but %s in text_config: the checkpoint has %s head",
                          r->file, key, cJSON_IsTrue(outer) ? "true" : "false",
                          cJSON_IsTrue(inner) ? "true" : "false", r->out->tied ? "no" : "a");
}

/* Rows of the table are never cut: they decide, whatever vocab_size says. */
static int read_vocab(qc_config_reader *r)
{
    const char *name = r->family->names[QC_SLOT_EMBEDDING];
    int64_t tensor = find_table(r), claimed = 0;
    if (tensor < 0)
        return qc_fail(r->err, QC_E_INPUT, "%s: tensor \"%s\" is missing", r->src->path, name);
    const qc_tensor_info *info = r->src->info(r->src, tensor);
    if (info->n_dims != 2 || info->shape[0] < 1 || info->shape[0] > INT32_MAX)
        return qc_fail(r->err, QC_E_INPUT, "%s: tensor \"%s\" is not a table of 1 to %d rows", r->src->path,
                       info->name, INT32_MAX);
    r->out->vocab = info->shape[0];
    QC_TRY(settle_wrapped_tie(r));
    QC_TRY(qc_config_int(r, r->json, "vocab_size", 0, -INT64_MAX, INT64_MAX, &claimed));
    if (!qc_json_get(r->json, "vocab_size"))
        return qc_config_note(r, QC_LOG_WARN, "%s: vocab_size is absent, the embedding has %lld rows",
                              r->file, (long long)r->out->vocab);
    if (claimed != r->out->vocab)
        return qc_config_note(r, QC_LOG_WARN,
                              "%s: vocab_size is %lld but the embedding has %lld rows, which are used",
                              r->file, (long long)claimed, (long long)r->out->vocab);
    return QC_OK;
}

static int read_config(qc_config_reader *r)
{
    qc_model_config *c = r->out;
    QC_TRY(find_family(r));
    QC_TRY(check_classes(r));
    QC_TRY(qc_config_check_keys(r));
    const qc_class_defaults *d = &r->family->defaults;
    QC_TRY(qc_config_count(r, "hidden_size", d->hidden, QC_DIM_MAX, &c->hidden));
    QC_TRY(qc_config_count(r, "num_hidden_layers", d->n_layers, MAX_LAYERS, &c->n_layers));
    QC_TRY(qc_config_count(r, "intermediate_size", d->ffn, QC_DIM_MAX, &c->ffn));
    QC_TRY(qc_config_count(r, "max_position_embeddings", d->max_positions, INT32_MAX, &c->max_positions));
    QC_TRY(read_heads(r));
    QC_TRY(read_flags(r));
    QC_TRY(qc_config_read_layers(r));
    QC_TRY(qc_config_read_rope(r));
    QC_TRY(read_vocab(r));
    return qc_config_read_ids(r);
}

int qc_model_config_load(const qc_source *src, qc_model_config *ret, qc_err *err)
{
    char *text = NULL, *file = NULL;
    size_t n_bytes = 0;
    cJSON *doc = NULL;
    qc_model_config config = {0};
    qc_config_reader r = {.src = src, .out = &config, .err = err};
    QC_TRY(src->side_file(src, "config.json", &text, &n_bytes, err));
    if (!text)
        return qc_fail(err, QC_E_INPUT, "%s: there is no config.json", src->path);
    r.file = file = qc_asprintf("%s/config.json", src->path);
    int rc = file ? QC_OK : qc_fail_nomem(err, "a path", strlen(src->path));
    if (rc == QC_OK)
        rc = qc_json_parse(text, n_bytes, file, true, &doc, err);
    if (rc == QC_OK) {
        r.outer = doc;
        rc = read_config(&r);
    }
    config.notes = r.notes.data;
    if (rc == QC_OK)
        *ret = config;
    else
        qc_model_config_clear(&config);
    cJSON_Delete(doc);
    qc_free(file);
    qc_free(text);
    return rc;
}

void qc_model_config_clear(qc_model_config *config)
{
    qc_free(config->layer_sparse);
    qc_free(config->layer_slides);
    qc_free(config->layer_rotates);
    qc_free(config->notes);
    *config = (qc_model_config){0};
}
