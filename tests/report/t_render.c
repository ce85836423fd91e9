/* Renderings and the reader: nothing from a report becomes markup, a broken report is named by the place of
 * its fault, no allocation fails unseen. */
#include "qc_alloc.h"
#include "qc_file.h"
#include "render.h"
#include "report_doc.h"

#include "qc_test.h"

#include <math.h>

/* A report as small as the schema allows, with TEXT for every string that comes from outside. */
static const char template_[] =
    "{\"schema\":\"qconvert-report/"
    "1\",\"tool\":{\"name\":@,\"version\":@,\"commit\":@,\"kernels\":@,\"compute\":@},"
    "\"model\":{\"path\":@,\"family\":@,\"layers\":2,\"files\":[{\"file\":@,\"sha256\":@}]},\"recipe\":{"
    "\"x\":@},\"plan\":{},"
    "\"calibration\":{\"text\":@,\"windows\":4,\"length\":8,\"tokens\":32,\"tokens_text\":99,\"ids_sha256\":@"
    ",\"ppl\":9},"
    "\"tensors\":[{\"name\":@,\"action\":@,\"rule\":@,\"layer\":0,\"source_dtype\":@,\"rows\":4,\"cols\":8,"
    "\"bits\":4,"
    "\"bytes_in\":64,\"bytes_out\":20,\"method\":@,\"relative_error\":0.01},"
    "{\"name\":@,\"action\":\"quantized\",\"rule\":@,\"layer\":1,\"source_dtype\":@,\"rows\":4,\"cols\":8,"
    "\"bits\":4,"
    "\"bytes_in\":64,\"bytes_out\":20,\"method\":@,\"relative_error\":0.02}],\"layers\":[],"
    "\"events\":[{\"kind\":@,\"level\":\"fallback\",\"subject\":@,\"detail\":@,\"count\":2}],"
    "\"evaluation\":{\"protocol\":@,\"text\":@,\"windows\":2,\"length\":8,\"tokens_scored\":14,\"ids_"
    "sha256\":@,\"ppl\":20,"
    "\"ppl_reference\":19,\"ppl_ratio\":1.05,\"delta_nll\":0.05,\"delta_nll_se\":0.01,\"kld_mean\":0.03,"
    "\"kld_p99\":0.2,"
    "\"kld_max\":0.5,\"top1\":0.9,\"kld_percentiles\":{\"p50\":0.02},"
    "\"kld_histogram\":{\"log10_from\":-3,\"log10_step\":1,\"counts\":[1,5,8]},"
    "\"per_window\":[{\"nll\":3,\"nll_reference\":2.9,\"kld\":0.1,\"top1\":0.8},"
    "{\"nll\":3.1,\"nll_reference\":3.2,\"kld\":null,\"top1\":null}]},"
    "\"artifacts\":[{\"format\":@,\"path\":@,\"bytes\":60,\"sha256\":@,\"rejected\":true}],"
    "\"gates\":[{\"name\":@,\"limit\":0.02,\"value\":0.03,\"pass\":false},{\"name\":\"top1\",\"limit\":0.8,"
    "\"value\":0.9,"
    "\"pass\":true},{\"name\":\"size_bytes\",\"limit\":1234567890,\"value\":1234567891,\"pass\":false}],"
    "\"timings\":{\"total\":1.5},\"peak_rss_bytes\":1000000}";

/* The template with `text` (JSON, quotes included) in place of each @. */
static cJSON *report_with(const char *text)
{
    static char filled[65536];
    size_t n = 0;
    for (const char *p = template_; *p; p++)
        n += (size_t)snprintf(filled + n, sizeof filled - n, *p == '@' ? "%s" : "%.1s", *p == '@' ? text : p);
    cJSON *doc;
    qc_err err;
    ck_assert_msg(qc_json_parse(filled, n, "r.json", true, &doc, &err) == QC_OK, "%s", err.msg);
    return doc;
}

static const qc_render_format formats[] = {QC_RENDER_TEXT, QC_RENDER_MARKDOWN, QC_RENDER_HTML,
                                           QC_RENDER_JUNIT};

START_TEST(nothing_from_a_report_becomes_markup)
{
    cJSON *doc = report_with("\"<script>&\\\"'|`*_@me [x](http://e) \\u001b[2J\\n# www.e\\uffff\"");
    static const char *const banned[] = {"<script>", "\x1b", "](http://e)", "\xEF\xBF\xBF"};
    qc_err err;
    ck_assert_msg(qc_report_check(doc, "r.json", &err) == QC_OK, "%s", err.msg);
    for (size_t f = 0; f < 4; f++) {
        qc_buf text = {0};
        ck_assert_msg(qc_render((const cJSON *const *)&doc, 1, formats[f], &text, &err) == QC_OK, "%s",
                      err.msg);
        ck_assert(qc_utf8_valid(text.data, text.n_bytes, NULL));
        bool xml = formats[f] == QC_RENDER_HTML || formats[f] == QC_RENDER_JUNIT;
        for (size_t i = 0; i < 4 && formats[f] != QC_RENDER_TEXT; i++)
            if (i < 2 || xml == (i == 3)) /* links are a matter of markdown, noncharacters of XML */
                ck_assert_msg(!strstr(text.data, banned[i]), "format %zu holds %s", f, banned[i]);
        if (formats[f] == QC_RENDER_TEXT)
            ck_assert(!strstr(text.data, "\x1b") && !strstr(text.data, "\n#"));
        if (formats[f] == QC_RENDER_MARKDOWN)
            ck_assert(!strstr(text.data, "@me") && !strstr(text.data, "\n#w") && !strstr(text.data, "|`"));
        qc_buf_clear(&text);
    }
    cJSON_Delete(doc);
}
END_TEST

START_TEST(figures_are_those_of_the_report)
{
    cJSON *doc = report_with("\"w\"");
    static const struct {
        qc_render_format format;
        const char *text;
    } cases[] = {
        {QC_RENDER_TEXT, "  perplexity    20.0000, reference 19.0000, ratio 1.05000\n"},
        {QC_RENDER_TEXT, "  gate          size_bytes 1234567891, limit 1234567890: FAILED\n"},
        {QC_RENDER_TEXT, "fallback        w, 2 times, first w: w\n"},
        {QC_RENDER_MARKDOWN, "| size\\_bytes | 1234567891 | 1234567890 | ❌ **failed** |\n"},
        {QC_RENDER_MARKDOWN, "| top1 | 0.9 | 0.8 | ✅ passed |\n"},
        {QC_RENDER_JUNIT, "<testsuites name=\"qconvert\" tests=\"3\" failures=\"2\">"},
        {QC_RENDER_JUNIT, "<failure type=\"gate\" message=\"size_bytes 1234567891, limit 1234567890\"/>"},
        {QC_RENDER_HTML, "window 1: 3.00000 nats, reference 2.90000, difference +0.10000"},
        {QC_RENDER_HTML, "8 positions, 57.14 %"},
        {QC_RENDER_HTML, "✗ 2 of 3 gates failed"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qc_buf text = {0};
        ck_assert_int_eq(qc_render((const cJSON *const *)&doc, 1, cases[i].format, &text, NULL), QC_OK);
        ck_assert_msg(strstr(text.data, cases[i].text) != NULL, "no \"%s\" in\n%s", cases[i].text, text.data);
        qc_buf_clear(&text);
    }
    cJSON_Delete(doc);
}
END_TEST

/* A comment of a pull request takes 65536 characters, however long names and lists are. */
START_TEST(markdown_stays_short)
{
    static char long_text[1200];
    memset(long_text, '|', sizeof long_text - 1);
    long_text[0] = long_text[sizeof long_text - 2] = '"';
    cJSON *doc = report_with(long_text);
    const char *const lists[] = {"tensors", "events", "gates", "artifacts"};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        cJSON *list = cJSON_GetObjectItemCaseSensitive(doc, lists[i]);
        for (int k = 0; k < 400; k++)
            cJSON_AddItemToArray(list, cJSON_Duplicate(cJSON_GetArrayItem(list, 0), true));
    }
    qc_buf text = {0};
    ck_assert_int_eq(qc_render((const cJSON *const *)&doc, 1, QC_RENDER_MARKDOWN, &text, NULL), QC_OK);
    ck_assert_uint_lt(text.n_bytes, 60000);
    qc_buf_clear(&text);
    cJSON_Delete(doc);
}
END_TEST

START_TEST(a_broken_report_is_refused_by_place)
{
    static const struct {
        const char *path, *value; /* value NULL: left out */
        int code;
        const char *message;
    } cases[] = {
        {"schema", "\"qconvert-report/2\"", QC_E_UNSUPPORTED,
         "r.json: of the newer schema qconvert-report/2, this program"},
        {"schema", "\"qconvert-report/10\"", QC_E_UNSUPPORTED,
         "r.json: of the newer schema qconvert-report/10"},
        {"schema", "\"qconvert-manifest/1\"", QC_E_INPUT, "r.json: of schema qconvert-manifest/1, a report"},
        {"schema", "\"qconvert-report/01\"", QC_E_INPUT, "r.json: of schema qconvert-report/01, a report"},
        {"schema", "\"qconvert-report/1.5\"", QC_E_INPUT, "r.json: of schema"},
        {"schema", "1", QC_E_INPUT, "r.json: is no report: it has no \"schema\""},
        {"schema", NULL, QC_E_INPUT, "r.json: is no report"},
        {"tensors", NULL, QC_E_INPUT, "r.json: tensors is missing"},
        {"tensors", "{}", QC_E_INPUT, "r.json: tensors: a list expected"},
        {"tensors", "[1]", QC_E_INPUT, "r.json: tensors[0]: an object expected"},
        {"tensors.1.rows", "-1", QC_E_INPUT, "r.json: tensors[1].rows: a whole number from 0 expected"},
        {"tensors.1.rows", "1.5", QC_E_INPUT, "r.json: tensors[1].rows: a whole number"},
        {"tensors.0.name", "7", QC_E_INPUT, "r.json: tensors[0].name: a string expected"},
        {"evaluation", "[]", QC_E_INPUT, "r.json: evaluation: an object expected"},
        {"evaluation.ppl", "\"1\"", QC_E_INPUT, "r.json: evaluation.ppl: a number expected"},
        {"evaluation.per_window.1.nll", NULL, QC_E_INPUT, "r.json: evaluation.per_window[1].nll is missing"},
        {"gates.0.pass", "null", QC_E_INPUT, "r.json: gates[0].pass: true or false expected"},
        {"timings.total", "\"x\"", QC_E_INPUT, "r.json: timings.total: a number expected"},
        {"artifacts", "[]", QC_E_INPUT, "r.json: artifacts: is empty"},
        {"evaluation.kld_histogram.counts", "[\"a\"]", QC_E_INPUT,
         "r.json: evaluation.kld_histogram.counts[0]: a number expected"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cJSON *doc = report_with("\"w\""), *at = doc;
        char path[100], *key = path;
        snprintf(path, sizeof path, "%s", cases[i].path);
        for (char *dot; (dot = strchr(key, '.')); key = dot + 1) {
            *dot = 0;
            at = cJSON_IsArray(at) ? cJSON_GetArrayItem(at, key[0] - '0')
                                   : cJSON_GetObjectItemCaseSensitive(at, key);
        }
        cJSON_DeleteItemFromObjectCaseSensitive(at, key);
        if (cases[i].value)
            cJSON_AddItemToObject(at, key, cJSON_Parse(cases[i].value));
        qc_err err = {0};
        ck_assert_int_eq(qc_report_check(doc, "r.json", &err), cases[i].code);
        ck_assert_msg(strncmp(err.msg, cases[i].message, strlen(cases[i].message)) == 0, "%s, not %s",
                      err.msg, cases[i].message);
        cJSON_Delete(doc);
    }
    qc_err err;
    cJSON *list = cJSON_CreateArray();
    ck_assert_int_eq(qc_report_check(list, "r.json", &err), QC_E_INPUT);
    cJSON_Delete(list);
}
END_TEST

/* What a later program adds to version 1 is passed over. */
START_TEST(unknown_keys_are_passed_over)
{
    cJSON *doc = report_with("\"w\"");
    cJSON_AddStringToObject(doc, "flavour", "new");
    ck_assert_int_eq(qc_report_check(doc, "r.json", NULL), QC_OK);
    cJSON_Delete(doc);
}
END_TEST

/* Values that no run makes, but a file may hold. */
START_TEST(odd_values_do_no_harm)
{
    static const struct {
        const char *list, *key;
        double value;
    } cases[] = {{"tensors", "layer", 1e300},
                 {"tensors", "layer", -1e300},
                 {"tensors", "relative_error", 1e-320},
                 {"tensors", "relative_error", -1},
                 {"tensors", "bytes_out", 1e300},
                 {"tensors", "bits", 1e308},
                 {"events", "count", 1e300},
                 {"gates", "value", 1e300},
                 {"artifacts", "bytes", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cJSON *doc = report_with("\"w\"");
        cJSON *item = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(doc, cases[i].list), 0);
        cJSON_ReplaceItemInObjectCaseSensitive(item, cases[i].key, cJSON_CreateNumber(cases[i].value));
        for (size_t f = 0; f < 4; f++) {
            qc_buf text = {0};
            qc_err err;
            ck_assert_msg(qc_render((const cJSON *const *)&doc, 1, formats[f], &text, &err) == QC_OK, "%s",
                          err.msg);
            ck_assert(!strstr(text.data, "=\"nan") && !strstr(text.data, "=\"inf") &&
                      !strstr(text.data, "=\"-nan"));
            qc_buf_clear(&text);
        }
        cJSON_Delete(doc);
    }
}
END_TEST

START_TEST(failed_allocations_are_errors)
{
    cJSON *doc = report_with("\"w\"");
    for (size_t f = 0; f < 4; f++) {
        long n = 0;
        for (long nth = 1; nth < 400; nth++) {
            qc_buf text = {0};
            qc_err err = {0};
            qc_alloc_fail_at(nth);
            int rc = qc_render((const cJSON *const *)&doc, 1, formats[f], &text, &err);
            n = qc_alloc_fail_at(0);
            ck_assert_msg(rc == (n >= nth ? QC_E_RESOURCE : QC_OK), "format %zu, allocation %ld: %d", f, nth,
                          rc);
            qc_buf_clear(&text);
            if (n < nth)
                break;
        }
    }
    cJSON_Delete(doc);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"nothing_from_a_report_becomes_markup", nothing_from_a_report_becomes_markup},
        {"figures_are_those_of_the_report", figures_are_those_of_the_report},
        {"markdown_stays_short", markdown_stays_short},
        {"a_broken_report_is_refused_by_place", a_broken_report_is_refused_by_place},
        {"unknown_keys_are_passed_over", unknown_keys_are_passed_over},
        {"odd_values_do_no_harm", odd_values_do_no_harm},
        {"failed_allocations_are_errors", failed_allocations_are_errors},
        {0},
    };
    return run_tests("render", cases);
}
