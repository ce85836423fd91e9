/* Recipes: every key, every kind of error with its place, hostile files. */
#include "corpus.h"
#include "gates.h"
#include "gptq.h"
#include "programs.h"
#include "qc_alloc.h"
#include "qc_test.h"
#include "recipe.h"
#include "schema.h"

#define N(a) ((int)(sizeof(a) / sizeof((a)[0])))

static qc_err err;
static qc_recipe r;

static int parse(const char *text)
{
    err = (qc_err){0};
    return qc_recipe_parse(text, strlen(text), "r.yaml", "dir", NULL, &r, &err);
}

START_TEST(defaults)
{
    ck_assert_msg(parse("model: m") == QC_OK, "%s", err.msg);
    ck_assert_str_eq(r.model, "dir/m");
    ck_assert_int_eq(r.quantize.method, QC_METHOD_RTN);
    qc_gptq_options gptq = qc_gptq_defaults();
    ck_assert_int_eq(r.quantize.gptq.order, gptq.order);
    ck_assert_double_eq(r.quantize.gptq.damp, gptq.damp);
    ck_assert_int_eq(r.quantize.gptq.refit, gptq.refit);
    ck_assert_int_eq(r.quantize.gptq.sweeps, gptq.sweeps);
    ck_assert_int_eq(r.quantize.weights.bits, 4);
    ck_assert_int_eq(r.quantize.weights.group, 128);
    ck_assert(r.quantize.weights.symmetric);
    ck_assert_int_eq(r.quantize.embedding.bits, 8);
    ck_assert_int_eq(r.quantize.embedding.group, -1);
    ck_assert(r.verify.enabled);
    ck_assert_ptr_null(r.verify.text);
    ck_assert_int_eq(r.verify.windows, 16);
    ck_assert_int_eq(r.verify.length, 0);
    ck_assert_int_eq(r.run.threads, 0);
    ck_assert_uint_eq(r.run.memory_bytes, 0);
    ck_assert_int_eq(r.n_emit, 0);
    qc_recipe_clear(&r);
}
END_TEST

START_TEST(every_supported_key)
{
    ck_assert_msg(
        parse("model: /abs/m\n"
              "calibration: {text: c.txt, windows: 12, length: 77, seed: 5, sample: random, "
              "documents: blank_line, plain_special: true, perplexity_limit: 50}\n"
              "quantize:\n"
              "  method: gptq\n"
              "  weights: {bits: 3, group: 64, symmetric: false, search: minmax, scale: bf16, "
              "group_fallback: smaller}\n"
              "  activations: none\n"
              "  embedding: {bits: 16, group: 32, symmetric: false}\n"
              "  gptq: {order: min-pivot, damp: 0.020, refit: false, sweeps: 3, inputs: original, shrink: "
              "0.25, correct: 0.75}\n"
              "  overrides:\n"
              "  - match: \"*.a\"\n"
              "    bits: 8\n"
              "  - {match: 'b', group: channel, symmetric: false}\n"
              "  skip: ['x*', y]\n"
              "  budget: none\n"
              "verify: {enabled: false, text: t.txt, windows: all, length: 512, gates: {ppl_ratio: "
              "1.5, size_bytes: 1.5kB}}\n"
              "run: {device: cpu, compute: f32, threads: 3, memory: 900MB, scratch: /tmp, "
              "allow_nonfinite: true}\n"
              "allow: {rtn_fallback: 2}\n"
              "emit:\n"
              "- {format: qpk, path: out/a.bin}\n"
              "- path: ../b.qpk\n"
              "report: {json: r.json, manifest: m.json}\n") == QC_OK,
        "%s", err.msg);
    ck_assert_str_eq(r.model, "/abs/m");
    ck_assert_str_eq(r.calibration.text, "dir/c.txt");
    ck_assert_int_eq(r.calibration.windows, 12);
    ck_assert_int_eq(r.calibration.length, 77);
    ck_assert_int_eq(r.calibration.seed, 5);
    ck_assert_int_eq(r.calibration.sample, QC_SAMPLE_RANDOM);
    ck_assert_int_eq(r.calibration.documents, QC_DOCUMENTS_BLANK_LINE);
    ck_assert(r.calibration.plain_special);
    ck_assert_double_eq(r.calibration.perplexity_limit, 50);
    const qc_recipe_quantize *q = &r.quantize;
    ck_assert_int_eq(q->method, QC_METHOD_GPTQ);
    ck_assert_int_eq(q->gptq.order, QC_ORDER_MIN_PIVOT);
    ck_assert_double_eq(q->gptq.damp, 0.02);
    ck_assert(!q->gptq.refit);
    ck_assert_int_eq(q->gptq.sweeps, 3);
    ck_assert_int_eq(q->gptq.inputs, 1);
    ck_assert_double_eq(q->gptq.shrink, 0.25);
    ck_assert_double_eq(q->gptq.correct, 0.75);
    ck_assert_int_eq(q->weights.bits, 3);
    ck_assert_int_eq(q->weights.group, 64);
    ck_assert(!q->weights.symmetric);
    ck_assert_int_eq(q->weights.search, QC_SEARCH_MINMAX);
    ck_assert_int_eq(q->weights.group_fallback, QC_GROUP_SMALLER);
    ck_assert_int_eq(q->embedding.bits, 16);
    ck_assert_int_eq(q->n_overrides, 2);
    ck_assert_str_eq(q->overrides[0].match, "*.a");
    ck_assert_int_eq(q->overrides[0].bits, 8);
    ck_assert_int_eq(q->overrides[0].group, 0);
    ck_assert_int_eq(q->overrides[0].symmetric, -1);
    ck_assert_int_eq(q->overrides[1].bits, 0);
    ck_assert_int_eq(q->overrides[1].group, -1);
    ck_assert_int_eq(q->overrides[1].symmetric, 0);
    ck_assert_int_eq(q->n_skip, 2);
    ck_assert_str_eq(q->skip[1], "y");
    ck_assert(!r.verify.enabled);
    ck_assert_str_eq(r.verify.text, "dir/t.txt");
    ck_assert_int_eq(r.verify.windows, 0);
    ck_assert_int_eq(r.verify.length, 512);
    ck_assert_int_eq(r.verify.n_gates, 2);
    ck_assert_str_eq(r.verify.gates[1].name, "size_bytes");
    ck_assert_double_eq(r.verify.gates[1].limit, 1500);
    ck_assert_int_eq(r.run.device, QC_DEVICE_CPU);
    ck_assert_int_eq(r.run.threads, 3);
    ck_assert_uint_eq(r.run.memory_bytes, 900000000);
    ck_assert_str_eq(r.run.scratch, "/tmp");
    ck_assert(r.run.allow_nonfinite);
    ck_assert_str_eq(r.allow[0].name, "rtn_fallback");
    ck_assert_int_eq(r.n_emit, 2);
    ck_assert_str_eq(r.emit[0].path, "dir/out/a.bin");
    ck_assert_int_eq(r.emit[1].format, QC_EMIT_QPK);
    ck_assert_str_eq(r.emit[1].path, "dir/../b.qpk");
    ck_assert_str_eq(r.report.manifest, "dir/m.json");
    qc_policy policy;
    qc_recipe_policy(&r.quantize, QC_DT_F16, &policy);
    ck_assert_int_eq(policy.weights.grid.scale_dtype, QC_DT_BF16);
    ck_assert(!policy.quantize_embedding);
    ck_assert_int_eq(policy.n_overrides, 2);
    qc_recipe_clear(&r);
}
END_TEST

/* JSON of a recipe is YAML and gives the same recipe again. */
START_TEST(json_reads_back)
{
    char *text[2];
    ck_assert_int_eq(parse("model: /m\nquantize: {weights: {group: channel}, skip: ['*'], overrides: "
                           "[{match: a, bits: 2}]}\n"
                           "verify: {gates: {top1: 0.5}}\nemit: [{path: /a.qpk}]\nrun: {memory: 1GiB}\n"),
                     QC_OK);
    for (int i = 0; i < 2; i++) {
        cJSON *doc = qc_recipe_to_json(&r);
        text[i] = cJSON_Print(doc);
        cJSON_Delete(doc);
        qc_recipe_clear(&r);
        if (i == 0)
            ck_assert_msg(parse(text[0]) == QC_OK, "%s", err.msg);
    }
    ck_assert_str_eq(text[0], text[1]);
    free(text[0]);
    free(text[1]);
}
END_TEST

/* What decides the bytes is in the short form, paths, threads and memory are not. */
START_TEST(artifact_json_is_independent_of_the_machine)
{
    char *text[2];
    static const char *const recipes[] = {
        "model: /m\nrun: {threads: 1}\n",
        "model: /n\nrun: {threads: 7, memory: 1GiB}\nemit: [{path: /a.qpk}]\n"
        "verify: {windows: 3}\n"};
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(parse(recipes[i]), QC_OK);
        cJSON *doc = qc_recipe_artifact_json(&r);
        text[i] = cJSON_Print(doc);
        cJSON_Delete(doc);
        qc_recipe_clear(&r);
    }
    ck_assert_str_eq(text[0], text[1]);
    ck_assert(strstr(text[0], "\"bits\"") && strstr(text[0], "\"compute\"") && !strstr(text[0], "threads"));
    free(text[0]);
    free(text[1]);
}
END_TEST

typedef struct bad_case {
    const char *yaml;
    const char *message; /* begins like this */
} bad_case;

static void check_bad(const bad_case *cases, int n, int code)
{
    for (int i = 0; i < n; i++) {
        int rc = parse(cases[i].yaml);
        ck_assert_msg(rc == code, "%s: code %d instead of %d: %s", cases[i].yaml, rc, code, err.msg);
        ck_assert_msg(strncmp(err.msg, cases[i].message, strlen(cases[i].message)) == 0,
                      "%s\n got: %s\nwant: %s", cases[i].yaml, err.msg, cases[i].message);
    }
}

START_TEST(wrong_content)
{
    static const bad_case cases[] = {
        {"model: m\nbitz: 4\n", "r.yaml:2:1: unknown key 'bitz'"},
        {"model: m\nquantize:\n  weights: {bit: 4}\n",
         "r.yaml:3:13: unknown key 'quantize.weights.bit' (did you mean 'bits'?)"},
        {"windows: 4\n", "r.yaml:1:1: unknown key 'windows' (did you mean 'calibration.windows'?)"},
        {"<<: {a: b}\n", "r.yaml:1:1: unknown key '<<'"},
        {"model: m\nmodel: n\n", "r.yaml:2:1: duplicate key 'model' (first on line 1)"},
        {"run: {threads: 1,\n threads: 1}\n", "r.yaml:2:2: duplicate key 'threads' (first on line 1)"},
        {"quantize: {weights: {bits: 9}}\n",
         "r.yaml:1:28: quantize.weights.bits: 9 is out of range (whole number 2 to 8 expected)"},
        {"quantize: {weights: {bits: four}}\n",
         "r.yaml:1:28: quantize.weights.bits: 'four' is not a whole number"},
        {"quantize: {weights: {bits: 4.0}}\n",
         "r.yaml:1:28: quantize.weights.bits: '4.0' is not a whole number"},
        {"quantize: {weights: {bits: 99999999999999999999}}\n",
         "r.yaml:1:28: quantize.weights.bits: '99999999999999999999' is too large"},
        {"quantize: {weights: {bits: -9223372036854775809}}\n",
         "r.yaml:1:28: quantize.weights.bits: '-9223372036854775809' is too large"},
        {"quantize: {weights: {bits: [4]}}\n",
         "r.yaml:1:28: quantize.weights.bits: a list where whole number 2 to 8 is expected"},
        {"quantize: {weights: {symmetric: yes}}\n",
         "r.yaml:1:33: quantize.weights.symmetric: 'yes' is not true or false"},
        {"quantize: {weights: {group: 8}}\n", "r.yaml:1:29: quantize.weights.group: 8 is out of range (whole "
                                              "number 16 to 1024 in steps of 8 or channel expected)"},
        {"quantize: {weights: {group: 100}}\n", "r.yaml:1:29: quantize.weights.group: 100 is out of range"},
        {"quantize: {weights: {search: best}}\n",
         "r.yaml:1:30: quantize.weights.search: 'best' is none of minmax, mse"},
        {"quantize: {gptq: {damp: 2}}\n", "r.yaml:1:25: quantize.gptq.damp: 2 is out of range (0 to 1)"},
        {"quantize: {gptq: {damp: nan}}\n", "r.yaml:1:25: quantize.gptq.damp: 'nan' is not a number"},
        {"quantize: {gptq: {damp: 0x1p3}}\n", "r.yaml:1:25: quantize.gptq.damp: '0x1p3' is not a number"},
        {"verify: {gates: {ppl_ratio: 1e999}}\n",
         "r.yaml:1:29: verify.gates.ppl_ratio: '1e999' is too large"},
        {"verify: {gates: {pplratio: 1}}\n", "r.yaml:1:18: verify.gates: unknown name 'pplratio'"},
        {"verify: {gates: [1]}\n", "r.yaml:1:17: verify.gates: a mapping is expected"},
        {"verify: {gates: {top1: {}}}\n", "r.yaml:1:24: verify.gates.top1: a number is expected"},
        {"run: {memory: 2G}\n", "r.yaml:1:15: run.memory: '2G' is not a size (as 4096, 420MB or 2GiB"},
        {"run: {memory: 0}\n", "r.yaml:1:15: run.memory: a size of 0 bytes; no limit is none"},
        {"run: {memory: 9999999999999TB}\n", "r.yaml:1:15: run.memory: '9999999999999TB' is too large"},
        {"run: 4\n", "r.yaml:1:6: run: a mapping is expected"},
        {"quantize: {activations: 8}\n", "r.yaml:1:25: quantize.activations: a mapping or none is expected"},
        {"quantize: {skip: '*'}\n", "r.yaml:1:18: quantize.skip: a list is expected"},
        {"quantize: {skip: [[a]]}\n", "r.yaml:1:19: quantize.skip[0]: a string is expected"},
        {"quantize: {skip: [a, ]}\nrun: {threads: -1}\n", "r.yaml:2:16: run.threads: -1 is out of range"},
        {"quantize: {overrides: [{bits: 8}]}\n", "r.yaml:1:24: quantize.overrides[0]: 'match' is missing"},
        {"quantize: {overrides: [{match: a, bits: 8}, {match: b, bits: 12}]}\n",
         "r.yaml:1:62: quantize.overrides[1].bits: 12 is out of range"},
        {"quantize: {overrides: [{match: }]}\n",
         "r.yaml:1:32: quantize.overrides[0].match: a value is needed"},
        {"quantize: {overrides: [a]}\n", "r.yaml:1:24: quantize.overrides[0]: a mapping is expected"},
        {"emit: [{format: qpk}]\n", "r.yaml:1:8: emit[0]: 'path' is missing"},
        {"emit: [{path: ''}]\n", "r.yaml:1:15: emit[0].path: empty path"},
        {"model: ''\n", "r.yaml:1:8: model: empty path"},
        {"model: [a, b]\n", "r.yaml:1:8: model: a list where path is expected"},
        {"quantize: {overrides: [{match: x, bits: 8}, {match: y}]}\n",
         "r.yaml:1:45: quantize.overrides[1]: 'match' alone sets nothing"},
    };
    check_bad(cases, N(cases), QC_E_INPUT);
}
END_TEST

START_TEST(wrong_yaml)
{
    static const bad_case cases[] = {
        {"", "r.yaml: empty file"},
        {"# only a comment\n", "r.yaml: empty file"},
        {"- a\n- b\n", "r.yaml:1:1: a mapping of keys"},
        {"just words\n", "r.yaml:1:1: a mapping of keys"},
        {"model: m\n---\nmodel: n\n", "r.yaml:2:1: a second document"},
        {"run:\n\tthreads: 1\n", "r.yaml:2:1: found character that cannot start any token"},
        {"run: {threads: 1\n", "r.yaml:2:1: did not find expected ',' or '}'"},
        {"model: \"abc\n", "r.yaml:2:1: found unexpected end of stream"},
        {"model: &a m\n", "r.yaml:1:8: anchors and aliases are not used"},
        {"model: *a\n", "r.yaml:1:8: anchors and aliases are not used"},
        {"&k model: m\n", "r.yaml:1:1: anchors and aliases are not used"},
        {"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "r.yaml:1:4: anchors and aliases are not used"},
        {"model: !!str m\n", "r.yaml:1:8: tags are not used"},
        {"run: !x {threads: 1}\n", "r.yaml:1:6: tags are not used"},
        {"[a]: b\n", "r.yaml:1:1: a key must be a word"},
        {"? {a: b}\n: c\n", "r.yaml:1:3: a key must be a word"},
        {"model: \"a\\0b\"\n", "r.yaml:1:8: NUL character in a text"},
        {"model: m\nrun: \xff\n", "r.yaml:2:6: invalid UTF-8"},
        {"model: \xc0\x80\n", "r.yaml:1:8: invalid UTF-8"},
        {"%YAML 9.9\n---\nmodel: m\n", "r.yaml:1:1: found incompatible YAML document"},
    };
    check_bad(cases, N(cases), QC_E_INPUT);
    ck_assert_int_eq(qc_recipe_parse("model: m\nrun\0: 1", 15, "r.yaml", NULL, NULL, &r, &err), QC_E_INPUT);
    ck_assert_str_eq(err.msg, "r.yaml:2:4: NUL character in the file");
}
END_TEST

START_TEST(not_built_yet)
{
    static const bad_case cases[] = {
        {"quantize: {activations: {bits: 8, dynamic: tensor}}\n",
         "r.yaml:1:44: quantize.activations.dynamic: 'tensor' is not supported yet (supported: token)"},
        {"emit: [{path: a.qpk, quantize: {activations: {bits: 8, dynamic: none}}}]\n",
         "r.yaml:1:65: emit[0].quantize.activations.dynamic: 'none' is not supported yet"},
    };
    check_bad(cases, N(cases), QC_E_UNSUPPORTED);
    static const bad_case no_type = {"emit: [{path: a.qpk, type: q4_k_m}]\n",
                                     "emit[0].type: 'q4_k_m' is no type of qpk (it has none)"};
    check_bad(&no_type, 1, QC_E_USAGE);
    /* what is broken elsewhere is found first: the whole recipe is checked */
    ck_assert_int_eq(parse("quantize: {activations: {bits: 8, dynamic: tensor}}\nrun: {threads: x}\n"),
                     QC_E_INPUT);
}
END_TEST

START_TEST(null_keeps_the_default)
{
    ck_assert_int_eq(parse("model: m\nquantize: {weights: {bits: , group: ~}, skip: null}\nverify:\nemit:\n"),
                     QC_OK);
    ck_assert_int_eq(r.quantize.weights.bits, 4);
    ck_assert_int_eq(r.quantize.weights.group, 128);
    ck_assert_int_eq(r.n_emit, 0);
    qc_recipe_clear(&r);
}
END_TEST

/* ---- hostile sizes ---- */

static char *repeat(const char *head, const char *part, int n, const char *tail)
{
    size_t n_head = strlen(head), n_part = strlen(part);
    char *text = malloc(n_head + n_part * (size_t)n + strlen(tail) + 1), *p = text + n_head;
    memcpy(text, head, n_head);
    for (int i = 0; i < n; i++, p += n_part)
        memcpy(p, part, n_part);
    memcpy(p, tail, strlen(tail) + 1);
    return text;
}

START_TEST(hostile_sizes)
{
    static const struct {
        const char *head, *part;
        int n;
        const char *tail, *message;
    } cases[] = {
        {"run: ", "[", 500000, "", "r.yaml:1:21: nested deeper than 16"},
        {"", "a: {", 200000, "", "r.yaml:1:64: nested deeper than 16"},
        {"run:\n", "- - ", 100000, "x", "r.yaml:2:31: nested deeper than 16"},
        {"quantize: {skip: [", "a, ", 300000, "]}", "r.yaml:1:12307: more than 4096 entries"},
        {"", "k", 1000000, ": 1\n", "r.yaml:"},
        {"model: ", "x", 1000000, "", NULL},
        {"run: {threads: ", "9", 900000, "}", "r.yaml:1:16: run.threads: '999999"},
        {"\n", "\n", 900000, "", "r.yaml: empty file"},
    };
    for (int i = 0; i < N(cases); i++) {
        char *text = repeat(cases[i].head, cases[i].part, cases[i].n, cases[i].tail);
        int rc = parse(text);
        ck_assert_msg(rc == (cases[i].message ? QC_E_INPUT : QC_OK), "case %d: %d %s", i, rc, err.msg);
        if (rc == QC_OK)
            qc_recipe_clear(&r);
        else
            ck_assert_msg(strncmp(err.msg, cases[i].message, strlen(cases[i].message)) == 0, "case %d: %s", i,
                          err.msg);
        free(text);
    }
}
END_TEST

/* The names that a recipe takes are those that src/report can judge. */
START_TEST(gate_names_are_those_of_the_report)
{
    size_t n;
    const char *word, *words = qc_schema_find("verify.gates")->words;
    for (int i = 0; (word = qc_word_at(words, i, &n)); i++) {
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)n, word);
        ck_assert_msg(qc_gate_check(name, 1, &err) == QC_OK, "%s", err.msg);
    }
    ck_assert_int_eq(qc_gate_check("nonsense", 1, &err), QC_E_USAGE);
    /* and none is missing: the error lists them all */
    for (const char *p = strchr(err.msg, '(') + 1; *p;) {
        char name[64];
        size_t k = strcspn(p, ",)");
        snprintf(name, sizeof name, "%.*s", (int)k, p);
        ck_assert_msg(qc_word_find(words, name) >= 0, "gate %s is no key of recipes", name);
        p += k + strspn(p + k, ",) ");
    }
}
END_TEST

/* A long override list with many names is fine. */
START_TEST(long_lists_are_fine)
{
    char *text = repeat("quantize:\n  overrides:\n", "  - {match: 'model.layers.*.mlp.down_proj', bits: 8}\n",
                        4000, "");
    ck_assert_msg(parse(text) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(r.quantize.n_overrides, 4000);
    qc_recipe_clear(&r);
    free(text);
}
END_TEST

/* ---- flags ---- */

static int load(const char *yaml, int n, const char *const *words)
{
    char *argv[32] = {(char *)(uintptr_t) "qconvert"};
    qc_args args;
    err = (qc_err){0};
    for (int i = 0; i < n; i++)
        argv[i + 1] = (char *)(uintptr_t)words[i];
    ck_assert_msg(qc_args_parse(&qc_program_qconvert, n + 1, argv, &args, &err) == QC_OK, "%s", err.msg);
    int rc = yaml ? qc_recipe_parse(yaml, strlen(yaml), "r.yaml", "dir", &args, &r, &err)
                  : qc_recipe_load(&args, &r, &err);
    qc_args_clear(&args);
    return rc;
}
#define LOAD(yaml, ...)                                                                                      \
    load(yaml, N(((const char *const[]){__VA_ARGS__})), (const char *const[]){__VA_ARGS__})

START_TEST(flags_win_over_the_file)
{
    static const char yaml[] = "model: m\nquantize: {weights: {bits: 4}, skip: [a], overrides: [{match: x, "
                               "bits: 2}], activations: none}\n"
                               "verify: {text: t, gates: {top1: 0.5, ppl: 3}}\nemit: [{path: o.qpk}]\n";
    ck_assert_msg(LOAD(yaml, "--bits", "5", "--bits=6", "--skip", "b", "--override",
                       "y:bits=3,symmetric=false", "--text", "u", "--gate", "top1=0.75",
                       "--set=emit.1.path=p.qpk", "--set", "model=n", "-o", "q.qpk") == QC_OK,
                  "%s", err.msg);
    ck_assert_int_eq(r.quantize.weights.bits, 6);
    ck_assert_int_eq(r.quantize.n_skip, 2);
    ck_assert_str_eq(r.quantize.skip[1], "b");
    ck_assert_int_eq(r.quantize.n_overrides, 2);
    ck_assert_str_eq(r.quantize.overrides[1].match, "y");
    ck_assert_int_eq(r.quantize.overrides[1].bits, 3);
    ck_assert_int_eq(r.quantize.overrides[1].symmetric, 0);
    ck_assert_str_eq(r.verify.text, "u"); /* options: from the current folder */
    ck_assert_int_eq(r.verify.n_gates, 2);
    ck_assert_double_eq(r.verify.gates[0].limit, 0.75);
    ck_assert_str_eq(r.model, "n");
    ck_assert_str_eq(r.emit[0].path, "q.qpk");
    ck_assert_str_eq(r.emit[1].path, "p.qpk");
    qc_recipe_clear(&r);
}
END_TEST

START_TEST(set_forms)
{
    ck_assert_msg(LOAD(NULL, "m", "-s", "quantize.skip[0]=*.x", "-s", "quantize.skip.1=&y", "-s",
                       "verify.windows=16", "-s", "verify.gates={top1: 0.5}", "-s", "run.threads=", "-s",
                       "emit=[{path: a.qpk}]") == QC_OK,
                  "%s", err.msg);
    ck_assert_str_eq(r.model, "m");
    ck_assert_str_eq(r.quantize.skip[0], "*.x");
    ck_assert_str_eq(r.quantize.skip[1], "&y");
    ck_assert_int_eq(r.verify.n_gates, 1);
    ck_assert_int_eq(r.run.threads, 0);
    qc_recipe_clear(&r);
}
END_TEST

START_TEST(wrong_flags)
{
    static const struct {
        const char *words[3];
        int code;
        const char *message;
    } cases[] = {
        {{"m", "--bits", "9"},
         QC_E_USAGE,
         "--bits: quantize.weights.bits: 9 is out of range (whole number 2 to 8 expected); see 'qconvert "
         "--help'"},
        {{"m", "--bits", ""}, QC_E_USAGE, "--bits: quantize.weights.bits: '' is not a whole number"},
        {{"m", "--text", ""}, QC_E_USAGE, "--text: verify.text: empty path"},
        {{"m", "--set", "verify.window=1"},
         QC_E_USAGE,
         "--set: unknown key 'verify.window' (did you mean 'windows'?); see"},
        {{"m", "--set", "verify"}, QC_E_USAGE, "--set: 'verify' is not NAME=VALUE"},
        {{"m", "--set", "=1"}, QC_E_USAGE, "--set: '=1' is not NAME=VALUE"},
        {{"m", "--set", "a..b=1"}, QC_E_USAGE, "--set: 'a..b' is not a key path"},
        {{"m", "--set", "emit[x].path=1"}, QC_E_USAGE, "--set: 'emit[x].path' is not a key path"},
        {{"m", "--set", "emit.2.path=a.qpk"}, QC_E_USAGE, "--set: emit: index 2 of a list of 0"},
        {{"m", "--set", "emit.99999999999999999999.path=a"},
         QC_E_USAGE,
         "--set: emit: index 99999999999999999999 of a list of 0"},
        {{"m", "--set", "emit=[{path: a"}, QC_E_USAGE, "--set: did not find expected"},
        {{"m", "--set", "model.x=a"}, QC_E_USAGE, "--set: model: a mapping where path is expected"},
        {{"m", "--gate", "top1"}, QC_E_USAGE, "--gate: 'top1' is not NAME=VALUE"},
        {{"m", "--gate", "nonsense=1"}, QC_E_USAGE, "--gate: verify.gates: unknown name 'nonsense'"},
        {{"m", "--override", "*.x"}, QC_E_USAGE, "--override: '*.x' is not GLOB:name=value"},
        {{"m", "--override", "*.x:"}, QC_E_USAGE, "--override: '*.x:' is not GLOB:name=value"},
        {{"m", "--override", "*.x:bits"}, QC_E_USAGE, "--override: '*.x:bits' is not GLOB:name=value"},
        {{"m", "--override", "*.x:bit=8"},
         QC_E_USAGE,
         "--override: unknown key 'quantize.overrides[0].bit' (did you mean 'bits'?)"},
        {{"m", "--override", "*.x:bits=8,bits=4"}, QC_E_USAGE, "--override: 'bits' is given twice"},
        {{"m", "--override", ":bits=8"}, QC_E_USAGE, "--override: quantize.overrides[0].match:"},
        {{"m", "--memory", "1.5.2GB"}, QC_E_USAGE, "--memory: run.memory: '1.5.2GB' is not a size"},
        {{"m", "-o", "model.bin"}, QC_E_USAGE, "emit[0]: the extension of 'model.bin' names no format"},
        {{"m", "--device", "cuda:9"}, QC_E_USAGE, "--device: run.device: 'cuda:9'"},
        {{""}, QC_E_USAGE, "the path of the model is empty; see"},
        {{"no/such.yaml"}, QC_E_INPUT, "no/such.yaml: "},
    };
    for (int i = 0; i < N(cases); i++) {
        int n = 0;
        while (n < 3 && cases[i].words[n])
            n++;
        int rc = load(NULL, n, cases[i].words);
        ck_assert_msg(rc == cases[i].code, "%s: %d %s", cases[i].words[n - 1], rc, err.msg);
        ck_assert_msg(strncmp(err.msg, cases[i].message, strlen(cases[i].message)) == 0, "%s: %s",
                      cases[i].words[n - 1], err.msg);
        if (rc == QC_OK)
            qc_recipe_clear(&r);
    }
}
END_TEST

START_TEST(sizes)
{
    static const struct {
        const char *text;
        uint64_t n_bytes; /* 0 = refused */
    } cases[] = {{"1", 1},
                 {"1B", 1},
                 {"1kB", 1000},
                 {"1KB", 1000},
                 {"1KiB", 1024},
                 {"420MB", 420000000},
                 {"2 GiB", 2147483648u},
                 {"1.5GB", 1500000000},
                 {"0.5KiB", 512},
                 {"1TB", 1000000000000},
                 {"", 0},
                 {"GB", 0},
                 {"1mb", 0},
                 {"1G", 0},
                 {"-1", 0},
                 {"1e3", 0},
                 {"1  GB", 0},
                 {"1GBx", 0},
                 {".", 0},
                 {"99999999TiB", 0}};
    for (int i = 0; i < N(cases); i++) {
        uint64_t n_bytes = 0;
        int rc = qc_parse_size(cases[i].text, &n_bytes, &err);
        ck_assert_msg((rc == QC_OK) == (cases[i].n_bytes > 0) && n_bytes == cases[i].n_bytes, "'%s'",
                      cases[i].text);
    }
}
END_TEST

/* Every allocation fails once: a clean error each time, no leak (sanitizer builds look). */
START_TEST(out_of_memory)
{
    static const char yaml[] =
        "model: m\nquantize: {weights: {bits: 4}, skip: [a], overrides: [{match: x, bits: 2}]}\n"
        "verify: {gates: {top1: 0.5}}\nemit: [{path: o.qpk}]\n";
    qc_alloc_fail_at(0);
    ck_assert_int_eq(parse(yaml), QC_OK);
    long n_allocs = qc_alloc_fail_at(0);
    qc_recipe_clear(&r);
    ck_assert_int_gt(n_allocs, 20);
    for (long i = 1; i <= n_allocs; i++) {
        qc_alloc_fail_at(i);
        int rc = parse(yaml);
        qc_alloc_fail_at(0);
        ck_assert_msg(rc == QC_E_RESOURCE, "allocation %ld: %d %s", i, rc, err.msg);
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"defaults", defaults},
        {"every_supported_key", every_supported_key},
        {"json_reads_back", json_reads_back},
        {"artifact_json_is_independent_of_the_machine", artifact_json_is_independent_of_the_machine},
        {"wrong_content", wrong_content},
        {"wrong_yaml", wrong_yaml},
        {"not_built_yet", not_built_yet},
        {"null_keeps_the_default", null_keeps_the_default},
        {"hostile_sizes", hostile_sizes},
        {"gate_names_are_those_of_the_report", gate_names_are_those_of_the_report},
        {"long_lists_are_fine", long_lists_are_fine},
        {"flags_win_over_the_file", flags_win_over_the_file},
        {"set_forms", set_forms},
        {"wrong_flags", wrong_flags},
        {"sizes", sizes},
        {"out_of_memory", out_of_memory},
        {NULL, NULL}};
    return run_tests("recipe", cases);
}
