#include "subject.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "report_doc.h"

#include <math.h>
#include <string.h>

typedef enum { WEIGHTS, TOKENIZER, NEITHER } file_kind;

static file_kind kind_of(const char *name)
{
    static const char *const tokenizer[] = {"tokenizer",      "vocab",        "merges",
                                            "special_tokens", "added_tokens", "spiece"};
    for (size_t i = 0; i < sizeof tokenizer / sizeof tokenizer[0]; i++)
        if (strncmp(name, tokenizer[i], strlen(tokenizer[i])) == 0)
            return TOKENIZER;
    return strncmp(name, "generation_config", 17) == 0 || strncmp(name, "chat_template", 13) == 0 ? NEITHER
                                                                                                  : WEIGHTS;
}

/* First file of a kind in `in` that `other` lacks or has with another hash; NULL if there is none. Files go
 * by their base name: the same model in another folder is the same model. */
static const char *first_difference(const cJSON *in, const cJSON *other, file_kind kind)
{
    const cJSON *x, *y;
    cJSON_ArrayForEach(x, in)
    {
        const char *name = qc_path_base(qc_report_string(x, "file"));
        bool found = kind_of(name) != kind;
        cJSON_ArrayForEach(y, other) found =
            found || (strcmp(qc_path_base(qc_report_string(y, "file")), name) == 0 &&
                      strcmp(qc_report_string(x, "sha256"), qc_report_string(y, "sha256")) == 0);
        if (!found)
            return name;
    }
    return NULL;
}

static const char *difference(const qc_report_pair *pair, file_kind kind)
{
    const cJSON *a = qc_json_get(qc_json_get(pair->a, "model"), "files"),
                *b = qc_json_get(qc_json_get(pair->b, "model"), "files");
    const char *name = first_difference(a, b, kind);
    return name ? name : first_difference(b, a, kind);
}

static bool both_differ(const cJSON *a, const cJSON *b, const char *key)
{
    const char *x = qc_report_string(a, key), *y = qc_report_string(b, key);
    return *x && *y && strcmp(x, y) != 0;
}

static int check_scored(const qc_report_pair *pair, const cJSON *a, const cJSON *b, qc_err *err)
{
    const char *file = difference(pair, TOKENIZER);
    double windows_a = qc_report_number(a, "windows"), windows_b = qc_report_number(b, "windows");
    double length_a = qc_report_number(a, "length"), length_b = qc_report_number(b, "length");
    if (both_differ(a, b, "protocol"))
        return qc_fail(err, QC_E_INPUT,
                       "%s was scored by protocol %.40s, %s by %.40s: they can not be compared", pair->a_name,
                       qc_report_string(a, "protocol"), pair->b_name, qc_report_string(b, "protocol"));
    if (strcmp(qc_report_string(a, "ids_sha256"), qc_report_string(b, "ids_sha256")) == 0)
        return QC_OK;
    if (both_differ(a, b, "text_sha256"))
        return qc_fail(err, QC_E_INPUT, "%s and %s were scored on different texts (sha256 %.12s and %.12s)",
                       pair->a_name, pair->b_name, qc_report_string(a, "text_sha256"),
                       qc_report_string(b, "text_sha256"));
    if (windows_a != windows_b || length_a != length_b)
        return qc_fail(
            err, QC_E_INPUT,
            "%s was scored on %.0f windows of %.0f tokens, %s on %.0f of %.0f: they can not be compared",
            pair->a_name, windows_a, length_a, pair->b_name, windows_b, length_b);
    if (file)
        return qc_fail(err, QC_E_INPUT, "%s and %s have different tokenizers: %.100s differs", pair->a_name,
                       pair->b_name, file);
    return qc_fail(err, QC_E_INPUT, "%s and %s were scored on different tokens (ids_sha256 %.12s and %.12s)",
                   pair->a_name, pair->b_name, qc_report_string(a, "ids_sha256"),
                   qc_report_string(b, "ids_sha256"));
}

typedef enum { BY_NAME, BY_FORMAT, BY_BEING_ALONE } match_rule;

static bool answers(const qc_report_pair *pair, int i, int k, match_rule rule)
{
    const cJSON *a = qc_report_part_at(pair->a, i).artifact, *b = qc_report_part_at(pair->b, k).artifact;
    if (rule == BY_NAME)
        return strcmp(qc_path_base(qc_report_string(a, "path")), qc_path_base(qc_report_string(b, "path"))) ==
               0;
    if (rule == BY_FORMAT)
        return strcmp(qc_report_string(a, "format"), qc_report_string(b, "format")) == 0;
    return qc_report_n_parts(pair->a) == 1 && qc_report_n_parts(pair->b) == 1;
}

int qc_subject_match(const qc_report_pair *pair, int **ret, qc_err *err)
{
    int n_a = qc_report_n_parts(pair->a), n_b = qc_report_n_parts(pair->b);
    int *match = qc_alloc((size_t)n_a + 1, sizeof *match);
    bool *taken = qc_calloc((size_t)n_b + 1, sizeof *taken);
    if (!match || !taken) {
        qc_free(match);
        qc_free(taken);
        return qc_fail_nomem(err, "outputs", (unsigned long long)(n_a + n_b) * sizeof *match);
    }
    for (int i = 0; i < n_a; i++)
        match[i] = -1;
    for (match_rule rule = BY_NAME; rule <= BY_BEING_ALONE; rule++)
        for (int i = 0; i < n_a; i++)
            for (int k = 0; k < n_b && match[i] < 0; k++)
                if (!taken[k] && answers(pair, i, k, rule)) {
                    match[i] = k;
                    taken[k] = true;
                }
    qc_free(taken);
    *ret = match;
    return QC_OK;
}

int qc_subject_check(const qc_report_pair *pair, bool other_model, qc_err *err)
{
    int *match, rc = QC_OK;
    const char *file = other_model ? NULL : difference(pair, WEIGHTS);
    if (file)
        return qc_fail(err, QC_E_INPUT,
                       "%s and %s are of different models: %.100s differs (--other-model compares them)",
                       pair->a_name, pair->b_name, file);
    QC_TRY(qc_subject_match(pair, &match, err));
    for (int i = 0; i < qc_report_n_parts(pair->a) && rc == QC_OK; i++) {
        const cJSON *a = qc_report_part_at(pair->a, i).evaluation,
                    *b = match[i] < 0 ? NULL : qc_report_part_at(pair->b, match[i]).evaluation;
        if (a && b)
            rc = check_scored(pair, a, b, err);
    }
    qc_free(match);
    return rc;
}
