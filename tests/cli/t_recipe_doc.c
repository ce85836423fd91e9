/* docs/recipe.md against the schema: every key has its row with type, default, unit, flag and meaning, and no
 * row names a key that does not exist. `t_recipe_doc print` prints the rows as they should be. */
#include "programs.h"
#include "qc_buf.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_test.h"
#include "recipe.h"
#include "schema.h"

static qc_err err;
static qc_buf rows;
static int n_rows;

static const char *flag_of(const char *path)
{
    static char text[64];
    const qc_opt *opt;
    for (int i = 0; (opt = qc_opt_at(&qc_program_qconvert, i)); i++)
        if (opt->key && *opt->key && strcmp(opt->key, path) == 0) {
            snprintf(text, sizeof text, "`--%s`", opt->name);
            return text;
        }
    return "";
}

static const char *today(const qc_key *key)
{
    static char text[128];
    if (!key->now)
        return "";
    snprintf(text, sizeof text, " (supported now: %s)", key->now);
    for (char *p = text; *p; p++)
        if (*p == '|')
            *p = '/';
    return text;
}

static void add_rows(const qc_key *table, const char *prefix, const char *flag_prefix)
{
    for (const qc_key *key = table; key->name; key++) {
        char path[256], flag_path[256];
        qc_buf type = {0};
        snprintf(path, sizeof path, "%s%s%s", prefix, *prefix ? "." : "", key->name);
        snprintf(flag_path, sizeof flag_path, "%s%s%s", flag_prefix, *flag_prefix ? "." : "", key->name);
        const char *deflt = key->deflt ? key->deflt : key->required ? "required" : "unset";
        if (qc_key_describe(key, &type, &err) < 0 ||
            qc_buf_printf(&rows, &err, "| `%s` | %s%s%s | %s | %s | %s%s |\n", path, type.data,
                          key->unit ? ", " : "", key->unit ? key->unit : "", deflt, flag_of(flag_path),
                          key->help, today(key)) < 0)
            exit(2);
        n_rows++;
        qc_buf_clear(&type);
        if (key->type == QC_KEY_LIST && key->sub) {
            strncat(path, "[]", sizeof path - strlen(path) - 1);
            strncat(flag_path, ".0", sizeof flag_path - strlen(flag_path) - 1);
        }
        if (key->sub && !key->optional)
            add_rows(key->sub, path, flag_path);
    }
}

START_TEST(every_key_has_its_row)
{
    char path[4096], *doc;
    size_t n_bytes;
    const char *root = getenv("QC_SOURCE_ROOT");
    ck_assert_ptr_nonnull(root);
    snprintf(path, sizeof path, "%s/docs/recipe.md", root);
    ck_assert_msg(qc_file_read(path, 1 << 20, &doc, &n_bytes, &err) == QC_OK, "%s", err.msg);
    int n_doc = 0;
    for (const char *line = doc; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        n_doc += strncmp(line, "| `", 3) == 0;
    for (char *row = rows.data; *row;) {
        char *end = strchr(row, '\n');
        *end = 0;
        ck_assert_msg(strstr(doc, row) != NULL, "docs/recipe.md lacks the row: %s", row);
        *end = '\n';
        row = end + 1;
    }
    ck_assert_int_eq(n_doc, n_rows);
    qc_free(doc);
}
END_TEST

/* The examples of the document are recipes: they parse. */
START_TEST(example_parses)
{
    char path[4096], *doc;
    size_t n_bytes;
    snprintf(path, sizeof path, "%s/docs/recipe.md", getenv("QC_SOURCE_ROOT"));
    ck_assert_msg(qc_file_read(path, 1 << 20, &doc, &n_bytes, &err) == QC_OK, "%s", err.msg);
    int n_examples = 0;
    for (char *start = doc; (start = strstr(start, "```yaml\n")); n_examples++) {
        qc_recipe r;
        start += strlen("```yaml\n");
        char *end = strstr(start, "```");
        int rc = qc_recipe_parse(start, (size_t)(end - start), "example", NULL, NULL, &r, &err);
        ck_assert_msg(rc == QC_OK, "example %d: %d %s", n_examples, rc, err.msg);
        qc_recipe_clear(&r);
    }
    ck_assert_int_eq(n_examples, 2);
    qc_free(doc);
}
END_TEST

int main(int argc, char **argv)
{
    add_rows(qc_schema, "", "");
    if (argc > 1 && strcmp(argv[1], "print") == 0) {
        fputs(rows.data, stdout);
        return 0;
    }
    const test_case cases[] = {
        {"every_key_has_its_row", every_key_has_its_row}, {"example_parses", example_parses}, {NULL, NULL}};
    return run_tests("recipe_doc", cases);
}
