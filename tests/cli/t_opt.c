/* Command lines: parsing, errors, help, man pages, of every program's table. */
#include "programs.h"
#include "qc_test.h"
#include "recipe.h"
#include "schema.h"

#define N(a) ((int)(sizeof(a) / sizeof((a)[0])))

static const qc_program *const programs[] = {&qc_program_qconvert, &qc_program_qinspect, &qc_program_qeval,
                                             &qc_program_qcalib, &qc_program_qreport};

static const qc_opt opts[] = {{"alpha", 'a', "Test", .help = "a switch"},
                              {"beta", 'b', .arg = "N", .unit = "apples", .deflt = "3", .help = "a number"},
                              {"gamma", 'c', .command = "do", .help = "a switch of do"},
                              {"delta", .help = "comes later", .later = true},
                              {0}};
static const qc_opt_note commands[] = {{"do", "something"}, {0}};
static const qc_program program = {.name = "prog", .commands = commands, .opts = opts, .max_operands = 2};

static qc_err err;
static qc_args args;

static int parse(int n, const char *const *words)
{
    char *argv[16] = {(char *)(uintptr_t) "prog"};
    for (int i = 0; i < n; i++)
        argv[i + 1] = (char *)(uintptr_t)words[i];
    return qc_args_parse(&program, n + 1, argv, &args, &err);
}
#define PARSE(...) parse(N(((const char *const[]){__VA_ARGS__})), (const char *const[]){__VA_ARGS__})

START_TEST(forms_of_options)
{
    ck_assert_int_eq(PARSE("--beta", "4", "x", "--beta=5", "-b6", "-b", "7", "y", "-aa"), QC_OK);
    ck_assert_int_eq(qc_args_count(&args, "beta"), 4);
    ck_assert_int_eq(qc_args_count(&args, "alpha"), 2);
    ck_assert_str_eq(qc_args_value(&args, "beta"), "7");
    ck_assert_int_eq(args.n_operands, 2);
    ck_assert_str_eq(args.operands[1], "y");
    ck_assert_ptr_null(args.command);
    qc_args_clear(&args);
    ck_assert_int_eq(PARSE("do", "-ab-1", "-c", "--", "--alpha", "-"), QC_OK);
    ck_assert_str_eq(qc_args_value(&args, "beta"), "-1");
    ck_assert_str_eq(args.command, "do");
    ck_assert_str_eq(args.operands[0], "--alpha");
    ck_assert_str_eq(args.operands[1], "-");
    qc_args_clear(&args);
    ck_assert_int_eq(PARSE("--beta="), QC_OK);
    ck_assert_str_eq(qc_args_value(&args, "beta"), "");
    qc_args_clear(&args);
    ck_assert_int_eq(PARSE("--nonsense-before", "--help"), QC_E_USAGE);
    ck_assert_int_eq(PARSE("a", "b", "--help", "--nonsense"), QC_OK);
    qc_args_clear(&args);
}
END_TEST

START_TEST(usage_errors)
{
    static const struct {
        const char *words[4];
        int code;
        const char *message;
    } cases[] = {
        {{"--bet", "4"}, QC_E_USAGE, "unknown option '--bet' (did you mean '--beta'?); see 'prog --help'"},
        {{"--zzzzzzzz"}, QC_E_USAGE, "unknown option '--zzzzzzzz'; see 'prog --help'"},
        {{"--alpha=1"}, QC_E_USAGE, "option '--alpha' takes no argument; see 'prog --help'"},
        {{"--beta"}, QC_E_USAGE, "option '--beta' needs an argument N; see 'prog --help'"},
        {{"-b"}, QC_E_USAGE, "option '-b' needs an argument N; see 'prog --help'"},
        {{"-az"}, QC_E_USAGE, "unknown option '-z'; see 'prog --help'"},
        {{"a", "b", "c"}, QC_E_USAGE, "unexpected argument 'c'; see 'prog --help'"},
        {{"--gamma"}, QC_E_USAGE, "option '--gamma' belongs to 'prog do'; see 'prog --help'"},
        {{"--delta"}, QC_E_UNSUPPORTED, "option '--delta' is not supported yet"},
        {{"--x\n\033[2J"}, QC_E_USAGE, "unknown option '--x\\x0a\\x1b[2J'; see 'prog --help'"},
    };
    for (int i = 0; i < N(cases); i++) {
        int n = 0;
        while (n < 4 && cases[i].words[n])
            n++;
        ck_assert_int_eq(parse(n, cases[i].words), cases[i].code);
        ck_assert_str_eq(err.msg, cases[i].message);
    }
}
END_TEST

START_TEST(numbers)
{
    int64_t value;
    ck_assert_int_eq(PARSE("--beta", "12"), QC_OK);
    ck_assert_int_eq(qc_args_int(&args, "beta", 0, 20, 3, &value, &err), QC_OK);
    ck_assert_int_eq(value, 12);
    ck_assert_int_eq(qc_args_int(&args, "alpha", 0, 20, 3, &value, &err), QC_OK);
    ck_assert_int_eq(value, 3);
    ck_assert_int_eq(qc_args_int(&args, "beta", 0, 11, 3, &value, &err), QC_E_USAGE);
    ck_assert_str_eq(err.msg, "--beta: 12 is out of range (0 to 11); see 'prog --help'");
    qc_args_clear(&args);
    ck_assert_int_eq(PARSE("--beta", "1x"), QC_OK);
    ck_assert_int_eq(qc_args_int(&args, "beta", 0, 11, 3, &value, &err), QC_E_USAGE);
    ck_assert_str_eq(err.msg, "--beta: '1x' is not a whole number; see 'prog --help'");
    qc_args_clear(&args);
}
END_TEST

static char *help_of(const qc_program *p)
{
    qc_buf text = {0};
    ck_assert_int_eq(qc_opt_help(p, &text, &err), QC_OK);
    return text.data;
}

START_TEST(tables_are_sound)
{
    for (int p = 0; p < N(programs); p++) {
        const qc_opt *a, *b;
        ck_assert_ptr_nonnull(programs[p]->examples);
        for (int i = 0; (a = qc_opt_at(programs[p], i)); i++) {
            ck_assert_msg(qc_opt_text(a) != NULL, "%s --%s has no help", programs[p]->name, a->name);
            ck_assert_msg(!a->key || !*a->key || qc_schema_find(a->key), "--%s sets unknown key %s", a->name,
                          a->key);
            ck_assert_msg(!a->value || a->key, "--%s has a value without a key", a->name);
            for (int j = 0; j < i && (b = qc_opt_at(programs[p], j)); j++) {
                ck_assert_str_ne(a->name, b->name);
                ck_assert_msg(!a->letter || a->letter != b->letter, "%s: -%c twice", programs[p]->name,
                              a->letter);
            }
        }
    }
}
END_TEST

/* At most 80 columns; every option is there, with default and unit if it takes an argument. */
START_TEST(help_is_complete)
{
    for (int p = 0; p < N(programs); p++) {
        char *text = help_of(programs[p]);
        const qc_opt *opt;
        for (const char *line = text; *line; line += strcspn(line, "\n") + 1)
            ck_assert_msg(strcspn(line, "\n") <= 80, "%s: %.90s", programs[p]->name, line);
        for (int i = 0; (opt = qc_opt_at(programs[p], i)); i++) {
            char term[80];
            snprintf(term, sizeof term, "--%s %s", opt->name, qc_opt_arg(opt) ? qc_opt_arg(opt) : "");
            const char *at = strstr(text, term);
            snprintf(term, sizeof term, "--%s\n", opt->name); /* a long one has a line of its own */
            at = at ? at : strstr(text, term);
            ck_assert_msg(opt->hidden ? !at : at != NULL, "%s: %s", programs[p]->name, term);
            if (opt->hidden || !qc_opt_arg(opt))
                continue;
            const char *deflt = strstr(at, "default:"), *next = strstr(at + 2, "\n      --");
            ck_assert_msg(deflt && (!next || deflt < next), "%s: %s has no default", programs[p]->name, term);
        }
        free(text);
    }
}
END_TEST

START_TEST(man_pages_have_all_sections)
{
    static const char *const sections[] = {".TH ",        ".SH NAME",     ".SH SYNOPSIS",   ".SH DESCRIPTION",
                                           ".SH OPTIONS", ".SH EXAMPLES", ".SH EXIT STATUS"};
    for (int p = 0; p < N(programs); p++) {
        qc_buf text = {0};
        ck_assert_int_eq(qc_opt_man(programs[p], "1.2.3", &text, &err), QC_OK);
        const char *at = text.data;
        for (int i = 0; i < N(sections); i++) {
            at = strstr(at, sections[i]);
            ck_assert_msg(at != NULL, "%s: %s", programs[p]->name, sections[i]);
        }
        qc_buf_clear(&text);
    }
}
END_TEST

/* An option of qconvert with a key does the same as --set with that key. */
START_TEST(flags_equal_set)
{
    static const char *const pairs[][2] = {
        {"--method=rtn", "quantize.method=rtn"},
        {"--bits=3", "quantize.weights.bits=3"},
        {"-g64", "quantize.weights.group=64"},
        {"--asymmetric", "quantize.weights.symmetric=false"},
        {"--symmetric", "quantize.weights.symmetric=true"},
        {"--search=minmax", "quantize.weights.search=minmax"},
        {"--group-fallback=keep", "quantize.weights.group_fallback=keep"},
        {"--embedding-bits=16", "quantize.embedding.bits=16"},
        {"--override=*.a:bits=8,group=channel",
         "quantize.overrides=[{match: '*.a', bits: 8, group: channel}]"},
        {"--skip=*.b", "quantize.skip=['*.b']"},
        {"-oa.qpk", "emit[0].path=a.qpk"},
        {"--report=r.json", "report.json=r.json"},
        {"--manifest=m.json", "report.manifest=m.json"},
        {"--text=t.txt", "verify.text=t.txt"},
        {"--windows=all", "verify.windows=all"},
        {"--length=77", "verify.length=77"},
        {"--gate=top1=0.9", "verify.gates.top1=0.9"},
        {"--no-verify", "verify.enabled=false"},
        {"--device=cpu", "run.device=cpu"},
        {"--compute=f32", "run.compute=f32"},
        {"--threads=7", "run.threads=7"},
        {"--memory=2GiB", "run.memory=2147483648"},
        {"--allow-nonfinite", "run.allow_nonfinite=true"},
    };
    for (int i = 0; i < N(pairs); i++) {
        char *json[2];
        for (int k = 0; k < 2; k++) {
            qc_recipe r;
            char *argv[] = {(char *)(uintptr_t) "qconvert", (char *)(uintptr_t)(k ? "--set" : pairs[i][0]),
                            (char *)(uintptr_t)pairs[i][1]};
            ck_assert_int_eq(qc_args_parse(&qc_program_qconvert, 2 + k, argv, &args, &err), QC_OK);
            ck_assert_msg(qc_recipe_load(&args, &r, &err) == QC_OK, "%s: %s", pairs[i][k], err.msg);
            cJSON *doc = qc_recipe_to_json(&r);
            json[k] = cJSON_PrintUnformatted(doc);
            cJSON_Delete(doc);
            qc_recipe_clear(&r);
            qc_args_clear(&args);
        }
        ck_assert_str_eq(json[0], json[1]);
        free(json[0]);
        free(json[1]);
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"forms_of_options", forms_of_options},
                               {"usage_errors", usage_errors},
                               {"numbers", numbers},
                               {"tables_are_sound", tables_are_sound},
                               {"help_is_complete", help_is_complete},
                               {"man_pages_have_all_sections", man_pages_have_all_sections},
                               {"flags_equal_set", flags_equal_set},
                               {NULL, NULL}};
    return run_tests("opt", cases);
}
