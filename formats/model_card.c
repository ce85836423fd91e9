#include "model_card.h"

#include "qc_alloc.h"
#include "qc_json.h"

#include <string.h>

static const char *text_of(const cJSON *object, const char *key)
{
    const char *text = cJSON_GetStringValue(qc_json_get(object, key));
    return text ? text : "?";
}

static int put_schemes(const qc_engine_format *format, const qc_schemes *s, qc_buf *ret, qc_err *err)
{
    int64_t kept = 0;
    QC_TRY(qc_buf_printf(ret, err, "| matrices | weights | scales | activations |\n|---|---|---|---|\n"));
    for (int i = 0; i < s->n_schemes; i++) {
        const qc_scheme *scheme = &s->schemes[i];
        int64_t n = 0;
        for (int64_t k = 0; k < s->n_entries; k++)
            n += s->entries[k].scheme == i;
        QC_TRY(qc_buf_printf(ret, err, "| %lld | INT%d %s | ", (long long)n, scheme->bits,
                             scheme->symmetric ? "symmetric" : "asymmetric"));
        if (scheme->group > 0)
            QC_TRY(qc_buf_printf(ret, err, "one per %lld inputs | ", (long long)scheme->group));
        else
            QC_TRY(qc_buf_printf(ret, err, "one per output | "));
        if (scheme->act_bits)
            QC_TRY(qc_buf_printf(ret, err, "INT%d, one scale per token |\n", scheme->act_bits));
        else
            QC_TRY(qc_buf_printf(ret, err, "as the model |\n"));
    }
    for (int64_t k = 0; k < s->n_entries; k++)
        kept += s->entries[k].scheme < 0;
    QC_TRY(qc_buf_printf(ret, err, "\n%s are stored as values.\n",
                         format->packs_tables ? "Norms and biases" : "Embedding, head and norms"));
    if (kept && format->packs_tables)
        return qc_buf_printf(ret, err, "So are %lld matrices.\n", (long long)kept);
    return kept ? qc_buf_printf(ret, err, "So are %lld matrices of the layers; config.json names them.\n",
                                (long long)kept)
                : QC_OK;
}

static int put_sources(const cJSON *manifest, qc_buf *ret, qc_err *err)
{
    const cJSON *inputs = qc_json_get(manifest, "inputs"), *item;
    QC_TRY(qc_buf_printf(ret, err, "\n## Made from\n\n| file | SHA-256 |\n|---|---|\n"));
    cJSON_ArrayForEach(item, inputs)
        QC_TRY(qc_buf_printf(ret, err, "| `%s` | `%s` |\n", text_of(item, "file"), text_of(item, "sha256")));
    return QC_OK;
}

static int put_recipe(const cJSON *manifest, qc_buf *ret, qc_err *err)
{
    const cJSON *recipe = qc_json_get(manifest, "recipe");
    char *text = recipe ? qc_json_print(recipe) : NULL;
    if (!recipe)
        return QC_OK;
    int rc = text ? qc_buf_printf(ret, err, "\n## Recipe\n\n```json\n%s```\n", text)
                  : qc_fail_nomem(err, "README.md", 4096);
    qc_free(text);
    return rc;
}

int qc_model_card(const char *name, const qc_engine_format *format, const qc_schemes *schemes,
                  const cJSON *manifest, qc_buf *ret, qc_err *err)
{
    const cJSON *tool = qc_json_get(manifest, "tool");
    QC_TRY(qc_buf_printf(ret, err, "---\nlibrary_name: %s\npipeline_tag: text-generation\n---\n# %s\n\n",
                         format->library, name));
    QC_TRY(qc_buf_printf(ret, err, "%s checkpoint written by %s %s.\n\n", format->title,
                         text_of(tool, "name"), text_of(tool, "version")));
    if (schemes->n_schemes)
        QC_TRY(put_schemes(format, schemes, ret, err));
    if (!manifest)
        return QC_OK;
    QC_TRY(put_sources(manifest, ret, err));
    return put_recipe(manifest, ret, err);
}
