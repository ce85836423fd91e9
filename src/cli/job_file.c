#include "job_file.h"

#include "job_report.h"
#include "qc_alloc.h"

#include <string.h>

int qc_job_begin_file(const job *j, const output *o, qc_qpk_writer *writer, qc_err *err)
{
    static const char *const names[] = {
        "config.json",           "generation_config.json",  "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char *text = NULL;
        size_t n_bytes = 0;
        QC_TRY(j->src->side_file(j->src, names[i], &text, &n_bytes, err));
        int rc = text ? qc_qpk_add_file(writer, names[i], text, n_bytes, err) : QC_OK;
        qc_free(text);
        QC_TRY(rc);
    }
    char *manifest = qc_job_embedded_manifest(j, o);
    if (!manifest)
        return qc_fail_nomem(err, "manifest", 4096);
    int rc = qc_qpk_add_file(writer, "manifest.json", manifest, strlen(manifest), err);
    qc_free(manifest);
    return rc == QC_OK ? qc_convert_metadata(&j->model.config, writer, err) : rc;
}
