/* Label tasks: scores of packed items against each text run on its own, reading of tasks and data,
 * statistics. */
#include "label_stats.h"
#include "labels.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_buf.h"
#include "qc_file.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "tol.h"

#include <math.h>
#include <unistd.h>

static qc_err err;

static void must(int rc)
{
    ck_assert_msg(rc == QC_OK, "%s", err.msg);
}

typedef struct fixture {
    qc_pool *pool;
    qc_backend *be;
    qc_source *src;
    qc_model model;
    qc_tokenizer *tok;
} fixture;

static void setup(fixture *f, const char *model)
{
    *f = (fixture){0};
    must(qc_pool_new(2, &f->pool, &err));
    must(qc_backend_cpu_new(f->pool, QC_COMPUTE_F32, &f->be, &err));
    must(qc_source_open(test_data(model), &f->src, &err));
    must(qc_model_open(f->src, &f->model, &err));
    must(qc_tokenizer_from_source(f->src, &f->tok, &err));
}

static void teardown(fixture *f)
{
    qc_tokenizer_free(f->tok);
    qc_model_close(&f->model);
    qc_source_close(f->src);
    qc_backend_close(f->be);
    qc_pool_free(f->pool);
}

static void write_file(char *path, const char *text)
{
    close(mkstemps(path, (int)strlen(strrchr(path, '.'))));
    must(qc_file_write(path, true, text, strlen(text), &err));
}

/* Log-likelihoods of all choices of a task behind their prompts, divided by the tokens of the choice: each
 * whole text a sequence of its own. ret[n_items * n_choices] */
static void alone(const fixture *f, const qc_task *task, int n_choices, double *ret)
{
    int64_t n_texts = task->n_items * n_choices, n_ids = 0;
    int64_t *lengths = calloc((size_t)n_texts, sizeof *lengths),
            *heads = calloc((size_t)n_texts, sizeof *heads);
    int32_t *ids = calloc((size_t)n_texts * 512, sizeof *ids);
    for (int64_t i = 0; i < n_texts; i++) {
        const qc_task_item *item = &task->items[i / n_choices];
        char text[4096];
        int32_t *whole, *head;
        snprintf(text, sizeof text, "%s%s", item->prompt, item->choices[i % n_choices]);
        must(qc_tokenizer_encode(f->tok, text, strlen(text), NULL, &whole, &lengths[i], &err));
        must(qc_tokenizer_encode(f->tok, item->prompt, strlen(item->prompt), NULL, &head, &heads[i], &err));
        ck_assert(lengths[i] <= 512 && lengths[i] > heads[i] &&
                  memcmp(whole, head, (size_t)heads[i] * sizeof *head) == 0);
        memcpy(ids + n_ids, whole, (size_t)lengths[i] * sizeof *ids);
        n_ids += lengths[i];
        qc_free(whole);
        qc_free(head);
    }
    qc_sequences seqs = {.ids = ids, .lengths = lengths, .n_sequences = n_texts};
    qc_token_score *scores = calloc((size_t)n_ids, sizeof *scores), *s = scores;
    must(qc_eval_tokens(f->be, &f->model, NULL, &seqs, NULL, scores, &err));
    for (int64_t i = 0; i < n_texts; s += lengths[i] - 1, i++) {
        ret[i] = 0;
        for (int64_t k = heads[i]; k < lengths[i]; k++)
            ret[i] -= (double)s[k - 1].nll_a / (double)(lengths[i] - heads[i]);
    }
    free(scores);
    free(ids);
    free(lengths);
    free(heads);
}

/* Answers of packed items = the largest of the sums of texts that run alone. The items are of many lengths,
 * fill several packs, and their choices have one to several tokens. */
START_TEST(packs)
{
    enum { ITEMS = 60 };
    fixture f;
    char data[] = "/tmp/qc-labels-XXXXXX.jsonl", path[] = "/tmp/qc-labels-XXXXXX.json", *text;
    size_t n_bytes;
    qc_buf rows = {0};
    qc_task task;
    qc_label_result r;
    setup(&f, "models/tiny/llama");
    must(qc_text_read(test_data("text/austen-heldout.txt"), &text, &n_bytes, &err));
    for (int i = 0; i < ITEMS; i++) {
        char part[1200];
        size_t n = 40 + (size_t)i * 17 % 900, at = (size_t)i * 3000;
        for (size_t k = 0; k < n; k++)
            part[k] =
                strchr("\"\\\n", text[at + k]) || (unsigned char)text[at + k] > 126 ? ' ' : text[at + k];
        part[n] = 0;
        must(qc_buf_printf(&rows, &err, "{\"text\": \"%s\", \"label\": %d}\n", part, i % 3));
    }
    write_file(data, rows.data);
    write_file(
        path,
        "{\"name\": \"t\", \"prompt\": \"Read this and say who it is about.\\n\\nText: {text}\\nIt is\","
        " \"choices\": [\" a\", \" Elizabeth Bennet of Longbourn\", \" Mr. Darcy, he said\"],"
        " \"normalize\": \"tokens\"}");
    must(qc_task_load(path, data, 0, &task, &err));
    ck_assert_int_eq(task.n_items, ITEMS);
    qc_label_options options = {0};
    must(qc_labels_score(f.be, f.tok, &f.model, &f.model, &task, &options, &r, &err));
    ck_assert_int_gt(r.tokens, 4 * 2048); /* several packs */
    static double sums[ITEMS * 3];
    int64_t right = 0;
    alone(&f, &task, 3, sums);
    for (int i = 0; i < ITEMS; i++) {
        double best = -INFINITY, second = -INFINITY;
        int answer = 0;
        for (int c = 0; c < 3; c++) {
            double s = sums[3 * i + c];
            if (s > best) {
                second = best;
                best = s;
                answer = c;
            } else if (s > second)
                second = s;
        }
        for (int c = 0; c < 3; c++) {
            ck_assert_double_eq_tol(r.log_p[3 * i + c], sums[3 * i + c], TOL_TOKEN_NLL);
            ck_assert_double_eq_tol(r.log_p_reference[3 * i + c], sums[3 * i + c], TOL_TOKEN_NLL);
        }
        ck_assert(r.n_choices[i] == 3 && best - second > 1e-3); /* no tie that rounding decides */
        ck_assert_int_eq(r.answers[i], answer);
        ck_assert_int_eq(r.answers_reference[i], answer);
        ck_assert_int_eq(r.labels[i], i % 3);
        right += answer == i % 3;
    }
    ck_assert_double_eq_tol(r.model.accuracy, (double)right / ITEMS, 1e-12);
    ck_assert(r.pair.lost == 0 && r.pair.won == 0 && r.pair.changed == 0 && r.pair.mcnemar_p == 1);
    qc_label_result_clear(&r);
    qc_task_clear(&task);
    qc_buf_clear(&rows);
    qc_free(text);
    unlink(data);
    unlink(path);
    teardown(&f);
}
END_TEST

/* A pack of parts against each path as a sequence of its own, every hidden state. */
START_TEST(parts)
{
    enum { N = 40 };
    fixture f;
    setup(&f, "models/demo-qwen3");
    int32_t ids[N];
    for (int i = 0; i < N; i++)
        ids[i] = 100 + 37 * i % 1500;
    /* 0: 0-9, 1: 10-19 behind 0, 2: 20-24 behind 1, 3: 25-29 behind 1, 4: 30-39 behind 0 */
    const qc_part tree[5] = {{10, -1}, {10, 0}, {5, 1}, {5, 1}, {10, 0}};
    const int64_t n_parts = 5, n = N;
    qc_sequences pack = {.ids = ids, .lengths = &n, .n_sequences = 1, .parts = tree, .n_parts = &n_parts};
    qc_eval_target targets[N];
    qc_token_score got[N], want[N];
    for (int i = 0; i < N; i++)
        targets[i] = (qc_eval_target){i, 7};
    pack.targets = targets;
    pack.n_targets = N;
    must(qc_eval_tokens(f.be, &f.model, NULL, &pack, NULL, got, &err));
    static const int paths[3][4] = {{0, 1, 2, -1}, {0, 1, 3, -1}, {0, 4, -1, -1}};
    static const int starts[6] = {0, 10, 20, 25, 30, 40};
    for (int p = 0; p < 3; p++) {
        int32_t line[N];
        int at[N];
        int64_t m = 0;
        for (int k = 0; paths[p][k] >= 0; k++)
            for (int i = starts[paths[p][k]]; i < starts[paths[p][k] + 1]; i++) {
                at[m] = i;
                line[m++] = ids[i];
            }
        qc_sequences one = {.ids = line, .lengths = &m, .n_sequences = 1, .targets = targets, .n_targets = m};
        must(qc_eval_tokens(f.be, &f.model, NULL, &one, NULL, want, &err));
        for (int64_t i = 0; i < m; i++)
            ck_assert_double_eq_tol((double)got[at[i]].nll_a, (double)want[i].nll_a, TOL_TOKEN_NLL);
    }
    teardown(&f);
}
END_TEST

static void refuse(const char *task, const char *rows, const char *suffix, const char *fragment)
{
    char data[64], path[] = "/tmp/qc-labels-XXXXXX.json";
    qc_task t;
    snprintf(data, sizeof data, "/tmp/qc-labels-XXXXXX%s", suffix);
    write_file(data, rows);
    write_file(path, task);
    ck_assert_int_eq(qc_task_load(path, data, 0, &t, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, fragment) != NULL, "%s", err.msg);
    unlink(data);
    unlink(path);
}

START_TEST(reading)
{
    static const char good[] = "{\"name\": \"t\", \"columns\": [\"label\", \"x\"], \"prompt\": \"{{{x}:\", "
                               "\"choices\": [\" no\", \" yes\"], \"content_free\": [\"N/A\"]}";
    char data[] = "/tmp/qc-labels-XXXXXX.csv", path[] = "/tmp/qc-labels-XXXXXX.json";
    qc_task t;
    write_file(data, "1,\"a \"\"b\"\", c\"\r\nno,plain\n\"0\",\"two\nlines\"");
    write_file(path, good);
    must(qc_task_load(path, data, 0, &t, &err));
    ck_assert(t.n_items == 3 && t.fixed && t.n_content_free == 1);
    ck_assert_str_eq(t.items[0].prompt, "{a \"b\", c:");
    ck_assert_str_eq(t.items[1].prompt, "{plain:");
    ck_assert_str_eq(t.items[2].prompt, "{two\nlines:");
    ck_assert_str_eq(t.content_free[0].prompt, "{N/A:");
    ck_assert(t.items[0].label == 1 && t.items[1].label == 0 && t.items[2].label == 0);
    qc_task_clear(&t);
    must(qc_task_load(path, data, 2, &t, &err));
    ck_assert(t.n_items == 2 && t.n_rows == 3 && t.items[0].row == 2 && t.items[1].row == 3);
    qc_task_clear(&t);
    unlink(data);
    unlink(path);
    refuse(good, "1,\"open", ".csv", "row 1: a quoted field has no end");
    refuse(good, "1,a,b\n", ".csv", "row 1: more fields");
    refuse(good, "1,a\n1\n", ".csv", "row 2: fewer fields");
    refuse(good, "1,\"a\"b\n", ".csv", "something behind a quoted field");
    refuse(good, "5,a\n", ".csv", "row 1: its label is none of the choices");
    refuse(good, "", ".csv", "no rows");
    refuse(good, "{\"x\": \"a\"}\n", ".jsonl", "row 1: its label");
    refuse(good, "{\"label\": 1}\n", ".jsonl", "row 1: no field x");
    refuse(good, "[1]\n", ".jsonl", "row 1: an object was expected");
    refuse(good, "{\"x\": \n", ".jsonl", "row 1");
    refuse("{\"name\": \"t\"}", "1,a\n", ".csv", "`prompt` were expected");
    refuse(
        "{\"name\": \"t\", \"prompt\": \"{x\", \"choices\": [\"a\", \"b\"], \"columns\": [\"label\", \"x\"]}",
        "0,a\n", ".csv", "has no end");
    refuse("{\"name\": \"t\", \"prompt\": \"x\", \"choices\": [\"a\"], \"columns\": [\"label\"]}", "0\n",
           ".csv", "2 to 64 texts");
    refuse("{\"name\": \"t\", \"prompt\": \"x\", \"choice\": 1}", "0\n", ".csv", "unknown key \"choice\"");
}
END_TEST

START_TEST(ag_news)
{
    char path[4096];
    const char *root = getenv("QC_DATA");
    qc_task t;
    int64_t count[4] = {0};
    if (!root) {
        printf("QC_DATA is not set: the rows of AG News are not read\n");
        return;
    }
    snprintf(path, sizeof path, "%s/text/ag_news.test.csv", root);
    must(qc_task_load("ag_news", path, 0, &t, &err));
    ck_assert_int_eq(t.n_items, 7600);
    for (int64_t i = 0; i < t.n_items; i++)
        count[t.items[i].label]++;
    for (int c = 0; c < 4; c++)
        ck_assert_int_eq(count[c], 1900);
    ck_assert_str_eq(
        t.items[0].prompt,
        "Classify the news articles into the categories of World, Sports, Business, and Technology.\n\n"
        "Article: Fears for T N pension after talks Unions representing workers at Turner   Newall say "
        "they are 'disappointed' after talks with stricken parent firm Federal Mogul.\nAnswer:");
    ck_assert(t.items[0].label == 2 && t.n_content_free == 3);
    qc_task_clear(&t);
}
END_TEST

/* By hand: answers 0 1 1 2 against labels 0 1 2 2: F1 of the classes 1, 2/3, 2/3. Coverage of the interval of
 * the difference: nominal 95 %, 8000 samples give it to 0.24 %. */
START_TEST(statistics)
{
    enum { N = 500, TRIALS = 8000 };
    const int32_t labels[4] = {0, 1, 2, 2}, answers[4] = {0, 1, 1, 2}, other[4] = {0, 0, 2, 0};
    qc_label_score s = qc_label_score_of(answers, labels, 4, 3);
    ck_assert_double_eq_tol(s.accuracy, 0.75, 1e-12);
    ck_assert_double_eq_tol(s.accuracy_se, 0.25, 1e-12);
    ck_assert_double_eq_tol(s.macro_f1, (1 + 2.0 / 3 + 2.0 / 3) / 3, 1e-12);
    ck_assert(isnan(qc_label_score_of(answers, labels, 4, 0).macro_f1));
    qc_label_pair p = qc_label_pair_of(answers, other, labels, 4);
    ck_assert(p.lost == 1 && p.won == 2 && p.changed == 3);
    ck_assert_double_eq_tol(p.delta, 0.25, 1e-12);
    ck_assert_double_eq_tol(p.mcnemar_p, 1, 1e-12); /* 2 (1 + 3) / 8 */
    static int32_t right[N], a[N], b[N];
    qc_rng rng;
    qc_rng_seed(&rng, 5);
    int covered = 0;
    for (int t = 0; t < TRIALS; t++) {
        for (int i = 0; i < N; i++) { /* 4 % lost, 2 % won: difference -0.02 */
            double u = qc_rng_uniform(&rng);
            a[i] = u < 0.04 || u > 0.8 ? 0 : 1; /* the reference is right (0) or not */
            b[i] = u < 0.04 ? 1 : u < 0.06 ? 0 : a[i];
        }
        p = qc_label_pair_of(b, a, right, N);
        covered += p.low <= -0.02 && -0.02 <= p.high;
    }
    printf("paired difference: coverage %.2f %%\n", 100.0 * covered / TRIALS);
    fflush(stdout);
    ck_assert(covered > 0.93 * TRIALS && covered < 0.97 * TRIALS);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"packs", packs},     {"parts", parts},           {"reading", reading},
                               {"ag_news", ag_news}, {"statistics", statistics}, {NULL, NULL}};
    return run_tests("labels", cases);
}
