/* Reports: no input may crash the reader, and what it accepts can be shown in every way, compared and judged.
 */
#include "compare.h"
#include "fuzz.h"
#include "qc_json.h"
#include "render.h"
#include "report_doc.h"
#include "verdict.h"

#include <string.h>

static void use(const cJSON *doc)
{
    static const qc_gate_rule rules[] = {{"ppl", 1.1, true},
                                         {"kld_mean", 1.1, true},
                                         {"top1", -0.1, true},
                                         {"tensor_error", 2, true},
                                         {"kld_mean", 1, false}};
    const qc_gate_rules set = {.rules = rules, .n_rules = 5, .confidence = 0.95};
    const qc_report_pair pair = {doc, doc, "a", "b"};
    for (qc_render_format f = QC_RENDER_TEXT; f <= QC_RENDER_JUNIT; f++) {
        qc_buf text = {0};
        FUZZ_CHECK(qc_render(&doc, 1, f, &text, NULL) == QC_OK &&
                   qc_utf8_valid(text.data, text.n_bytes, NULL));
        FUZZ_CHECK(f != QC_RENDER_HTML || !strstr(text.data, "<script"));
        qc_buf_clear(&text);
    }
    FUZZ_CHECK(qc_subject_check(&pair, false, NULL) == QC_OK); /* a report is about the same as itself */
    cJSON *answer = qc_compare_make(&pair, 0);
    FUZZ_CHECK(answer && cJSON_IsTrue(qc_json_get(answer, "same")));
    cJSON_Delete(answer);
    FUZZ_CHECK(qc_verdict_make(&pair, &set, &answer, NULL) == QC_OK);
    cJSON_Delete(answer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    cJSON *doc = NULL;
    qc_err err = {0};
    int rc = qc_json_parse((const char *)data, n_bytes, "fuzz", true, &doc, &err);
    if (rc == QC_OK) {
        rc = qc_report_check(doc, "fuzz", &err);
        if (rc == QC_OK)
            use(doc);
        cJSON_Delete(doc);
    }
    if (rc != QC_OK)
        FUZZ_CHECK((rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED) && !strchr(err.msg, '\n') &&
                   strncmp(err.msg, "fuzz:", 5) == 0);
    return 0;
}
