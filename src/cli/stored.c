#include "stored.h"

#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_sha256.h"
#include "stats_file.h"

#include <string.h>

int qc_stored_tokenizer_sha256(const qc_source *src, char ret_hex[65], qc_err *err)
{
    char *json = NULL;
    size_t n_bytes;
    QC_TRY(src->side_file(src, "tokenizer.json", &json, &n_bytes, err));
    ret_hex[0] = 0;
    int rc = json ? qc_sha256_buffer(json, n_bytes, ret_hex, err) : QC_OK;
    qc_free(json);
    return rc;
}

int qc_stored_origin(const qc_source *src, const char *text, int compute, qc_reference_origin *ret,
                     qc_err *err)
{
    *ret = (qc_reference_origin){
        .model = src->path, .text = text, .compute = compute == QC_COMPUTE_BF16 ? "bf16" : "f32"};
    QC_TRY(qc_stats_model_sha256(src, ret->model_sha256, err));
    QC_TRY(qc_stored_tokenizer_sha256(src, ret->tokenizer_sha256, err));
    return qc_sha256_file(text, ret->text_sha256, err);
}

int qc_stored_check_text(const qc_reference *ref, const qc_source *src, int64_t vocab,
                         const qc_windows *windows, qc_err *err)
{
    char tokenizer[65];
    QC_TRY(qc_stored_tokenizer_sha256(src, tokenizer, err));
    return qc_reference_fits(ref, windows, vocab, tokenizer, err);
}

static int check_hash(const qc_reference *ref, const qc_source *src, const char *sha256, const char *what,
                      qc_err *err)
{
    const qc_reference_origin *o = qc_reference_origin_of(ref);
    if (strcmp(sha256, o->model_sha256) == 0)
        return QC_OK;
    return qc_fail(err, QC_E_INPUT,
                   "%s: scores of another model (%s, SHA-256 %.16s...) than %s %s (%.16s...)",
                   qc_reference_path(ref), o->model, o->model_sha256, src->path, what, sha256);
}

/* Hashes of the inputs that a manifest lists; *ret_n = 0 if it lists none. */
static int manifest_digests(const cJSON *doc, char (**ret)[65], int64_t *ret_n, qc_err *err)
{
    const cJSON *inputs = qc_json_get(doc, "inputs");
    int64_t n = cJSON_IsArray(inputs) ? cJSON_GetArraySize(inputs) : 0;
    char(*digests)[65] = *ret = qc_calloc((size_t)n + 1, sizeof *digests);
    if (!digests)
        return qc_fail_nomem(err, "manifest", (unsigned long long)n * sizeof *digests);
    *ret_n = n;
    for (int64_t i = 0; i < n; i++) {
        const cJSON *sha256 = qc_json_get(cJSON_GetArrayItem(inputs, (int)i), "sha256");
        if (!cJSON_IsString(sha256) || strlen(sha256->valuestring) != 64)
            *ret_n = 0;
        else
            memcpy(digests[i], sha256->valuestring, 65);
    }
    return QC_OK;
}

int qc_stored_check_artifact(const qc_reference *ref, const qc_source *src, qc_err *err)
{
    char *json = NULL, sha256[65], (*digests)[65] = NULL;
    size_t n_bytes;
    int64_t n = 0;
    cJSON *doc = NULL;
    if (strcmp(src->format, "qpk") != 0)
        return QC_OK;
    QC_TRY(src->side_file(src, "manifest.json", &json, &n_bytes, err));
    if (!json)
        return QC_OK;
    int rc = qc_json_parse(json, n_bytes, src->path, false, &doc, err);
    if (rc == QC_OK)
        rc = manifest_digests(doc, &digests, &n, err);
    if (rc == QC_OK && n > 0)
        rc = qc_stats_model_sha256_of((const char(*)[65])digests, n, sha256, err);
    if (rc == QC_OK && n > 0)
        rc = check_hash(ref, src, sha256, "was made from", err);
    qc_free(digests);
    cJSON_Delete(doc);
    qc_free(json);
    return rc;
}

int qc_stored_check_model(const qc_reference *ref, const qc_source *src, const char (*digests)[65],
                          qc_err *err)
{
    char sha256[65];
    QC_TRY(qc_stats_model_sha256_of(digests, src->n_files, sha256, err));
    return check_hash(ref, src, sha256, "is", err);
}
