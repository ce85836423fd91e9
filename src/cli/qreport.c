/* qreport: show reports, compare them, judge them. */
#include "compare.h"
#include "gates_file.h"
#include "main.h"
#include "programs.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "render.h"
#include "report_doc.h"
#include "schema.h"
#include "verdict.h"

#include <stdio.h>
#include <string.h>

/* ---- input and output ---- */

/* Reports of a command, in the order of their operands. */
typedef struct reports {
    cJSON **docs;
    int n;
} reports;

static int load_reports(const qc_args *args, reports *ret, qc_err *err)
{
    if (!(ret->docs = qc_calloc((size_t)args->n_operands + 1, sizeof(cJSON *))))
        return qc_fail_nomem(err, "reports", (unsigned long long)args->n_operands * sizeof(cJSON *));
    for (; ret->n < args->n_operands; ret->n++)
        QC_TRY(qc_report_load(args->operands[ret->n], &ret->docs[ret->n], err));
    return QC_OK;
}

static void clear_reports(reports *r)
{
    for (int i = 0; i < r->n; i++)
        cJSON_Delete(r->docs[i]);
    qc_free(r->docs);
}

#define JSON (-1) /* beside the values of qc_render_format */

/* The format asked for, if it is one of `choices`. */
static int choose_format(const qc_args *args, const char *choices, int *ret, qc_err *err)
{
    static const struct {
        const char *name;
        int format;
    } formats[] = {{"text", QC_RENDER_TEXT},
                   {"markdown", QC_RENDER_MARKDOWN},
                   {"html", QC_RENDER_HTML},
                   {"junit", QC_RENDER_JUNIT},
                   {"json", JSON}};
    const char *text = qc_args_value(args, "format");
    text = text ? text : "text";
    if (qc_word_find(choices, text) < 0)
        return qc_args_fail(args->program, err, "--format: '%.60s' is none of %s", text, choices);
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (strcmp(formats[i].name, text) == 0)
            *ret = formats[i].format;
    return QC_OK;
}

/* What can be refused is refused before anything is read. */
static int check_output(const qc_args *args, qc_err *err)
{
    const char *path = qc_args_value(args, "output"),
               *others[] = {qc_args_value(args, "baseline"), qc_args_value(args, "gates")};
    bool same = false;
    for (int i = 0; path && i < args->n_operands; i++)
        same = same || qc_path_same(path, args->operands[i]);
    for (int i = 0; path && i < 2; i++)
        same = same || (others[i] && qc_path_same(path, others[i]));
    if (same)
        return qc_fail(err, QC_E_USAGE, "%s: the output would replace a file that is read", path);
    return path ? qc_outfile_check(path, qc_args_has(args, "force"), err) : QC_OK;
}

/* To stdout or, whole or not at all, to --output. */
static int put_output(const qc_args *args, const qc_buf *text, qc_err *err)
{
    const char *path = qc_args_value(args, "output");
    if (path)
        return qc_file_write(path, qc_args_has(args, "force"), text->data, text->n_bytes, err);
    fwrite(text->data, 1, text->n_bytes, stdout);
    return QC_OK;
}

static int append_json(const cJSON *doc, qc_buf *ret, qc_err *err)
{
    char *text = qc_json_print(doc);
    int rc = text ? qc_buf_append(ret, text, strlen(text), err) : qc_fail_nomem(err, "json text", 4096);
    qc_free(text);
    return rc;
}

/* ---- commands: a positive result is the exit code ---- */

static int render(const qc_args *args, qc_err *err)
{
    int format = QC_RENDER_TEXT;
    reports r = {0};
    qc_buf text = {0};
    if (args->n_operands == 0)
        return qc_args_fail(args->program, err, "no REPORT.json given");
    QC_TRY(choose_format(args, "text|markdown|html|junit", &format, err));
    QC_TRY(check_output(args, err));
    int rc = load_reports(args, &r, err);
    if (rc == QC_OK)
        rc = qc_render((const cJSON *const *)r.docs, r.n, (qc_render_format)format, &text, err);
    if (rc == QC_OK)
        rc = put_output(args, &text, err);
    qc_buf_clear(&text);
    clear_reports(&r);
    return rc;
}

static int tolerance_of(const qc_args *args, double *ret, qc_err *err)
{
    const char *text = qc_args_value(args, "tolerance");
    qc_err why;
    *ret = 1e-6;
    if (text && (qc_parse_float(text, ret, &why) < 0 || !(*ret >= 0 && *ret < 1)))
        return qc_args_fail(args->program, err, "--tolerance: '%.60s' is no fraction from 0 to 1", text);
    return QC_OK;
}

static int compare_pair(const qc_args *args, const qc_report_pair *pair, int format, double tolerance,
                        qc_err *err)
{
    qc_buf text = {0};
    QC_TRY(qc_subject_check(pair, qc_args_has(args, "other-model"), err));
    cJSON *doc = qc_compare_make(pair, tolerance);
    int rc = doc ? QC_OK : qc_fail_nomem(err, "comparison", 4096);
    if (rc == QC_OK)
        rc = format == JSON ? append_json(doc, &text, err)
                            : qc_compare_render(doc, (qc_render_format)format, &text, err);
    if (rc == QC_OK)
        rc = put_output(args, &text, err);
    if (rc == QC_OK && !cJSON_IsTrue(qc_json_get(doc, "same")))
        rc = 1;
    cJSON_Delete(doc);
    qc_buf_clear(&text);
    return rc;
}

static int compare(const qc_args *args, qc_err *err)
{
    int format = QC_RENDER_TEXT;
    double tolerance = 0;
    reports r = {0};
    if (args->n_operands != 2)
        return qc_args_fail(args->program, err, "compare takes two reports");
    QC_TRY(choose_format(args, "text|markdown|json", &format, err));
    QC_TRY(tolerance_of(args, &tolerance, err));
    QC_TRY(check_output(args, err));
    int rc = load_reports(args, &r, err);
    if (rc == QC_OK)
        rc = compare_pair(args, &(qc_report_pair){r.docs[0], r.docs[1], args->operands[0], args->operands[1]},
                          format, tolerance, err);
    clear_reports(&r);
    return rc;
}

static int judge(const qc_args *args, const qc_report_pair *pair, const qc_gate_rules *rules, int format,
                 qc_err *err)
{
    qc_buf text = {0};
    cJSON *doc;
    if (pair->b)
        QC_TRY(qc_subject_check(pair, qc_args_has(args, "other-model"), err));
    QC_TRY(qc_verdict_make(pair, rules, &doc, err));
    int rc = format == JSON ? append_json(doc, &text, err)
                            : qc_verdict_render(doc, (qc_render_format)format, &text, err);
    if (rc == QC_OK)
        rc = put_output(args, &text, err);
    if (rc == QC_OK && !cJSON_IsTrue(qc_json_get(doc, "passed")))
        rc = 1;
    cJSON_Delete(doc);
    qc_buf_clear(&text);
    return rc;
}

static int check_baseline(const qc_args *args, const qc_gate_rules *rules, qc_err *err)
{
    for (int i = 0; i < rules->n_rules && !qc_args_has(args, "baseline"); i++)
        if (rules->rules[i].to_baseline)
            return qc_args_fail(args->program, err,
                                "%s has gates against a baseline (%s ...), but there is no --baseline",
                                qc_args_value(args, "gates"), rules->rules[i].name);
    return QC_OK;
}

static int gate(const qc_args *args, qc_err *err)
{
    int format = QC_RENDER_TEXT;
    const char *baseline = qc_args_value(args, "baseline"), *gates = qc_args_value(args, "gates");
    qc_gates_file file;
    reports r = {0};
    cJSON *base = NULL;
    if (args->n_operands != 1 || !gates)
        return qc_args_fail(args->program, err, "gate takes one report and --gates FILE");
    QC_TRY(choose_format(args, "text|markdown|junit|json", &format, err));
    QC_TRY(check_output(args, err));
    QC_TRY(qc_gates_file_load(gates, &file, err));
    int rc = check_baseline(args, &file.rules, err);
    if (rc == QC_OK)
        rc = load_reports(args, &r, err);
    if (rc == QC_OK && baseline)
        rc = qc_report_load(baseline, &base, err);
    if (rc == QC_OK)
        rc = judge(args, &(qc_report_pair){r.docs[0], base, args->operands[0], baseline}, &file.rules, format,
                   err);
    cJSON_Delete(base);
    clear_reports(&r);
    qc_gates_file_clear(&file);
    return rc;
}

static int report(const qc_args *args, qc_err *err)
{
    const char *command = args->command ? args->command : "";
    if (strcmp(command, "render") == 0)
        return render(args, err);
    if (strcmp(command, "compare") == 0)
        return compare(args, err);
    if (strcmp(command, "gate") == 0)
        return gate(args, err);
    if (strcmp(command, "schema") == 0)
        return qc_print_json(qc_report_schema(), err);
    return qc_args_fail(args->program, err, "no command given");
}

int main(int argc, char **argv)
{
    return qc_main(&qc_program_qreport, argc, argv, report);
}
