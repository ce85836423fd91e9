/* End and begin ids. generation_config.json comes first: it is what generation obeys. */
#include "config_internal.h"

#include "qc_alloc.h"

#include <string.h>

#define MAX_EOS ((int)(sizeof((qc_model_config *)0)->eos / sizeof(int32_t)))

typedef struct id_list {
    int32_t ids[MAX_EOS];
    int n;
} id_list;

static bool contains(const id_list *list, int32_t id)
{
    for (int i = 0; i < list->n; i++)
        if (list->ids[i] == id)
            return true;
    return false;
}

static int append(qc_config_reader *r, id_list *list, int32_t id)
{
    if (contains(list, id))
        return QC_OK;
    if (list->n == MAX_EOS)
        return qc_fail(r->err, QC_E_UNSUPPORTED, "%s: more than %d end ids", r->file, MAX_EOS);
    list->ids[list->n++] = id;
    return QC_OK;
}

/* Negative means "not set", as null does. */
static int append_item(qc_config_reader *r, const char *file, const char *key, const cJSON *item,
                       id_list *list)
{
    int64_t id = 0;
    if (cJSON_IsNull(item))
        return QC_OK;
    if (!qc_json_int(item, &id))
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is not an integer", file, key);
    if (id >= r->out->vocab)
        return qc_fail(r->err, QC_E_INPUT, "%s: \"%s\" is %lld, expected less than the vocabulary's %lld",
                       file, key, (long long)id, (long long)r->out->vocab);
    return id < 0 ? QC_OK : append(r, list, (int32_t)id);
}

static int read_id_list(qc_config_reader *r, const char *file, const cJSON *object, const char *key,
                        id_list *list)
{
    const cJSON *item = qc_json_get(object, key);
    if (!item)
        return QC_OK;
    if (!cJSON_IsArray(item))
        return append_item(r, file, key, item, list);
    for (item = item->child; item; item = item->next)
        QC_TRY(append_item(r, file, key, item, list));
    return QC_OK;
}

static int load_side_json(qc_config_reader *r, const char *name, cJSON **ret_doc)
{
    char *text = NULL;
    size_t n_bytes = 0;
    *ret_doc = NULL;
    QC_TRY(r->src->side_file(r->src, name, &text, &n_bytes, r->err));
    if (!text)
        return QC_OK;
    int rc = qc_json_parse(text, n_bytes, name, false, ret_doc, r->err);
    qc_free(text);
    return rc < 0 ? qc_err_prefix(r->err, "%s", r->src->path) : QC_OK;
}

static const char *token_content(const cJSON *token)
{
    const cJSON *content = cJSON_IsObject(token) ? qc_json_get(token, "content") : token;
    return cJSON_IsString(content) ? content->valuestring : NULL;
}

/* tokenizer_config.json names its end token by text; its table of added tokens gives the id. */
static int add_tokenizer_eos(qc_config_reader *r, id_list *eos)
{
    cJSON *doc = NULL;
    QC_TRY(load_side_json(r, "tokenizer_config.json", &doc));
    const char *text = token_content(qc_json_get(doc, "eos_token"));
    const cJSON *table = qc_json_get(doc, "added_tokens_decoder");
    int rc = QC_OK;
    for (const cJSON *t = text && table ? table->child : NULL; t && rc == QC_OK; t = t->next) {
        const char *content = token_content(t);
        int64_t id = 0;
        for (const char *p = t->string; p && *p >= '0' && *p <= '9' && id < r->out->vocab; p++)
            id = 10 * id + (*p - '0');
        if (!content || strcmp(content, text) != 0 || id >= r->out->vocab || contains(eos, (int32_t)id))
            continue;
        rc = qc_config_note(r, QC_LOG_WARN,
                            "%s/tokenizer_config.json: eos_token has id %lld, which the other files do not "
                            "name; added as the last end id",
                            r->src->path, (long long)id);
        if (rc == QC_OK)
            rc = append(r, eos, (int32_t)id);
    }
    cJSON_Delete(doc);
    return rc;
}

static int merge_eos(qc_config_reader *r, const id_list *generation, const id_list *config, id_list *ret)
{
    bool all = true;
    *ret = generation->n ? *generation : *config;
    if (generation->n == 0 ||
        (generation->n == config->n &&
         memcmp(generation->ids, config->ids, sizeof(int32_t) * (size_t)config->n) == 0))
        return QC_OK;
    for (int i = 0; i < config->n; i++) {
        all = all && contains(generation, config->ids[i]);
        QC_TRY(append(r, ret, config->ids[i]));
    }
    return qc_config_note(
        r, all ? QC_LOG_INFO : QC_LOG_WARN,
        "%s: eos_token_id differs from generation_config.json; all %d end ids are kept, %d first", r->file,
        ret->n, ret->ids[0]);
}

int qc_config_read_ids(qc_config_reader *r)
{
    id_list in_config = {.n = 0}, in_generation = {.n = 0}, eos = {.n = 0}, bos = {.n = 0};
    const cJSON *eos_of = qc_json_get(r->json, "eos_token_id") ? r->json : r->outer;
    const cJSON *bos_of = qc_json_get(r->json, "bos_token_id") ? r->json : r->outer;
    cJSON *generation = NULL;
    QC_TRY(read_id_list(r, r->file, eos_of, "eos_token_id", &in_config));
    QC_TRY(read_id_list(r, r->file, bos_of, "bos_token_id", &bos));
    QC_TRY(load_side_json(r, "generation_config.json", &generation));
    int rc = read_id_list(r, "generation_config.json", generation, "eos_token_id", &in_generation);
    if (rc == QC_OK && bos.n == 0)
        rc = read_id_list(r, "generation_config.json", generation, "bos_token_id", &bos);
    cJSON_Delete(generation);
    if (rc < 0)
        return rc;
    QC_TRY(merge_eos(r, &in_generation, &in_config, &eos));
    QC_TRY(add_tokenizer_eos(r, &eos));
    r->out->bos = bos.n ? bos.ids[0] : -1;
    for (int i = 0; i < MAX_EOS; i++)
        r->out->eos[i] = i < eos.n ? eos.ids[i] : -1;
    r->out->n_eos = eos.n;
    return QC_OK;
}
