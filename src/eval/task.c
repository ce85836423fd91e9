#include "task.h"

#include "qc_alloc.h"
#include "qc_buf.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_math.h"
#include "qc_sha256.h"

#include <stdio.h>
#include <string.h>

#define MAX_TASK_BYTES ((size_t)1 << 20)
#define MAX_DATA_BYTES ((size_t)1 << 30)
enum { MAX_CHOICES = 64, MAX_COLUMNS = 64 };

/* Zhao et al. 2021, "Calibrate before use": prompt, label words and content-free inputs. */
static const char ag_news[] =
    "{\"name\": \"ag_news\", \"columns\": [\"label\", \"title\", \"description\"], \"first_label\": 1,"
    " \"prompt\": \"Classify the news articles into the categories of World, Sports, Business, and "
    "Technology."
    "\\n\\nArticle: {title} {description}\\nAnswer:\","
    " \"choices\": [\" World\", \" Sports\", \" Business\", \" Technology\"],"
    " \"content_free\": [\"N/A\", \"\", \"[MASK]\"]}";

/* A row as an object of strings (and of a list, where choices come with the row). */
typedef struct reader {
    const cJSON *task;
    const char *task_name, *data_name;
    qc_task *ret;
    int64_t n_wanted;
} reader;

static int bad_task(const reader *r, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "task %s: %s", r->task_name, what);
}

static int bad_row(const reader *r, int64_t row, const char *what, const char *key, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "%s: row %lld: %s%s", r->data_name, (long long)row, what, key);
}

/* ---- one item ---- */

/* Value of a field as text; NULL if the row has none. Numbers stand as they would be printed. */
static const char *field_text(const cJSON *row, const char *key, char number[32])
{
    const cJSON *item = qc_json_get(row, key);
    int64_t n;
    if (cJSON_IsString(item))
        return item->valuestring;
    if (!qc_json_int(item, &n))
        return NULL;
    snprintf(number, 32, "%lld", (long long)n);
    return number;
}

/* The template with {field} replaced, by `content` if that is given; "{{" stands for "{". */
static int fill_prompt(const reader *r, const cJSON *row, int64_t n_row, const char *content, qc_buf *ret,
                       qc_err *err)
{
    const char *p = qc_json_get(r->task, "prompt")->valuestring;
    while (*p) {
        size_t n = strcspn(p, "{");
        QC_TRY(qc_buf_append(ret, p, n, err));
        p += n;
        if (p[0] == '{' && p[1] == '{') {
            QC_TRY(qc_buf_append(ret, p, 1, err));
            p += 2;
        } else if (*p == '{') {
            char key[128], number[32];
            n = strcspn(p, "}");
            if (!p[n] || n - 1 >= sizeof key)
                return bad_task(r, "prompt: a field {name} has no end", err);
            snprintf(key, sizeof key, "%.*s", (int)n - 1, p + 1);
            const char *text = content ? content : field_text(row, key, number);
            if (!text)
                return bad_row(r, n_row, "no field ", key, err);
            QC_TRY(qc_buf_append(ret, text, strlen(text), err));
            p += n + 1;
        }
    }
    return ret->n_bytes ? QC_OK : bad_row(r, n_row, "its prompt is empty", "", err);
}

static void item_clear(qc_task_item *item)
{
    qc_free(item->prompt);
    for (int i = 0; i < item->n_choices; i++)
        qc_free(item->choices[i]);
    qc_free(item->choices);
}

static int copy_choices(const reader *r, const cJSON *list, int64_t row, qc_task_item *item, qc_err *err)
{
    int n = cJSON_IsArray(list) ? cJSON_GetArraySize(list) : 0;
    if (n < 2 || n > MAX_CHOICES)
        return bad_row(r, row, "choices: a list of 2 to 64 texts was expected", "", err);
    item->choices = qc_calloc((size_t)n, sizeof *item->choices);
    if (!item->choices)
        return qc_fail_nomem(err, "choices", (unsigned long long)n * 8);
    for (const cJSON *c = list->child; c; c = c->next) {
        if (!cJSON_IsString(c) || !*c->valuestring)
            return bad_row(r, row, "choices: a text was expected in each place", "", err);
        if (!(item->choices[item->n_choices] = qc_strdup(c->valuestring)))
            return qc_fail_nomem(err, "choices", strlen(c->valuestring));
        item->n_choices++;
    }
    return QC_OK;
}

/* The label as a number from first_label on, or as the text of a choice (blanks around it left out). */
static bool find_label(const reader *r, const cJSON *row, qc_task_item *item)
{
    const cJSON *name = qc_json_get(r->task, "label"), *first = qc_json_get(r->task, "first_label");
    char number[32];
    const char *text = field_text(row, cJSON_IsString(name) ? name->valuestring : "label", number);
    int64_t base = 0;
    if (!text || (first && !qc_json_int(first, &base)))
        return false;
    for (int i = 0; i < item->n_choices; i++) {
        char place[32];
        const char *choice = item->choices[i] + strspn(item->choices[i], " ");
        snprintf(place, sizeof place, "%lld", (long long)(base + i));
        if (strcmp(text, place) == 0 || strcmp(text, choice) == 0) {
            item->label = i;
            return true;
        }
    }
    return false;
}

static int make_item(const reader *r, const cJSON *row, int64_t n_row, const char *content, qc_task_item *ret,
                     qc_err *err)
{
    const cJSON *choices = qc_json_get(r->task, "choices");
    qc_buf prompt = {0};
    int rc = fill_prompt(r, row, n_row, content, &prompt, err);
    *ret = (qc_task_item){.prompt = prompt.data, .row = n_row};
    if (rc == QC_OK)
        rc = copy_choices(r, cJSON_IsString(choices) ? qc_json_get(row, choices->valuestring) : choices,
                          n_row, ret, err);
    if (rc == QC_OK && !content && !find_label(r, row, ret))
        rc = bad_row(r, n_row, "its label is none of the choices", "", err);
    if (rc < 0)
        item_clear(ret);
    return rc;
}

/* ---- rows ---- */

/* Is row `row` (from 0) of n one of the evenly spread ones? */
static bool is_wanted(const reader *r, int64_t row, int64_t n)
{
    int64_t want = r->n_wanted > 0 && r->n_wanted < n ? r->n_wanted : n;
    return (row + 1) * want / n > row * want / n;
}

/* A list of row objects; taken over by the caller. The fields of a CSV row are the task's `columns`. */
static int read_csv(const reader *r, const char *text, size_t n_bytes, cJSON *list, qc_err *err)
{
    const cJSON *columns = qc_json_get(r->task, "columns");
    const char *p = text, *end = text + n_bytes;
    if (!cJSON_IsArray(columns) || cJSON_GetArraySize(columns) > MAX_COLUMNS)
        return bad_task(r, "columns: the names of the fields of a CSV row were expected", err);
    for (int64_t row = 1; p < end; row++) {
        cJSON *object = qc_json_add_item(list, cJSON_CreateObject());
        const cJSON *column = columns->child;
        for (bool last = false; !last; column = column->next) {
            qc_buf field = {0};
            int rc = QC_OK;
            bool quoted = p < end && *p == '"';
            if (!column || !cJSON_IsString(column))
                return bad_row(r, row, "more fields than the task has columns", "", err);
            p += quoted;
            while (p < end && rc == QC_OK) {
                if (quoted && *p == '"' && (p + 1 == end || p[1] != '"'))
                    break;
                if (!quoted && (*p == ',' || *p == '\n' || *p == '\r'))
                    break;
                p += quoted && *p == '"';
                rc = qc_buf_append(&field, p++, 1, err);
            }
            if (rc == QC_OK && quoted && p++ >= end)
                rc = bad_row(r, row, "a quoted field has no end", "", err);
            if (rc == QC_OK)
                cJSON_AddStringToObject(object, column->valuestring, field.data ? field.data : "");
            qc_buf_clear(&field);
            QC_TRY(rc);
            last = p >= end || *p != ',';
            p += !last;
        }
        if (column)
            return bad_row(r, row, "fewer fields than the task has columns", "", err);
        p += p < end && *p == '\r';
        if (p < end && *p++ != '\n')
            return bad_row(r, row, "something behind a quoted field", "", err);
    }
    return QC_OK;
}

static int read_jsonl(const reader *r, const char *text, size_t n_bytes, cJSON *list, qc_err *err)
{
    const char *p = text, *end = text + n_bytes;
    for (int64_t row = 1; p < end; row++) {
        const char *stop = memchr(p, '\n', (size_t)(end - p));
        size_t n = (size_t)((stop ? stop : end) - p);
        cJSON *object;
        if (strspn(p, " \t\r") < n) {
            char name[600];
            snprintf(name, sizeof name, "%.500s: row %lld", r->data_name, (long long)row);
            QC_TRY(qc_json_parse(p, n, name, true, &object, err));
            if (!cJSON_IsObject(object)) {
                cJSON_Delete(object);
                return bad_row(r, row, "an object was expected", "", err);
            }
            qc_json_add_item(list, object);
        }
        p += n + 1;
    }
    return QC_OK;
}

static int add_items(reader *r, const cJSON *rows, qc_err *err)
{
    qc_task *t = r->ret;
    int64_t n = cJSON_GetArraySize(rows), row = 0;
    if (n == 0)
        return qc_fail(err, QC_E_INPUT, "%s: no rows", r->data_name);
    t->n_rows = n;
    t->items = qc_calloc((size_t)n, sizeof *t->items);
    if (!t->items)
        return qc_fail_nomem(err, "items", (unsigned long long)n * sizeof *t->items);
    for (const cJSON *object = rows->child; object; object = object->next, row++)
        if (is_wanted(r, row, n)) {
            QC_TRY(make_item(r, object, row + 1, NULL, &t->items[t->n_items], err));
            t->n_items++;
        }
    return QC_OK;
}

static int add_content_free(reader *r, qc_err *err)
{
    const cJSON *list = qc_json_get(r->task, "content_free");
    qc_task *t = r->ret;
    int n = cJSON_IsArray(list) ? cJSON_GetArraySize(list) : 0;
    if (!list)
        return QC_OK;
    if (!t->fixed || n < 1 || n > MAX_CHOICES)
        return bad_task(
            r, "content_free: a list of texts was expected, with choices that are the same in all rows", err);
    t->content_free = qc_calloc((size_t)n, sizeof *t->content_free);
    if (!t->content_free)
        return qc_fail_nomem(err, "items", (unsigned long long)n * sizeof *t->content_free);
    for (const cJSON *c = list->child; c; c = c->next) {
        if (!cJSON_IsString(c))
            return bad_task(r, "content_free: a list of texts was expected", err);
        QC_TRY(make_item(r, NULL, 0, c->valuestring, &t->content_free[t->n_content_free], err));
        t->n_content_free++;
    }
    return QC_OK;
}

static int check_task(reader *r, qc_err *err)
{
    static const char *const keys[] = {"name",  "columns",     "prompt",    "choices",
                                       "label", "first_label", "normalize", "content_free"};
    static const char *const normalize[] = {
        [QC_NORMALIZE_NONE] = "none", [QC_NORMALIZE_TOKENS] = "tokens", [QC_NORMALIZE_BYTES] = "bytes"};
    const cJSON *name = qc_json_get(r->task, "name"), *how = qc_json_get(r->task, "normalize"),
                *choices = qc_json_get(r->task, "choices");
    for (const cJSON *item = r->task->child; item; item = item->next) {
        bool known = false;
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            known = known || (item->string && strcmp(item->string, keys[i]) == 0);
        if (!known)
            return qc_fail(err, QC_E_INPUT, "task %s: unknown key \"%.100s\"", r->task_name,
                           item->string ? item->string : "");
    }
    if (!cJSON_IsString(name) || !cJSON_IsString(qc_json_get(r->task, "prompt")))
        return bad_task(r, "texts `name` and `prompt` were expected", err);
    if (!cJSON_IsArray(choices) && !cJSON_IsString(choices))
        return bad_task(r, "choices: a list of texts, or the name of the field that has them, was expected",
                        err);
    r->ret->fixed = cJSON_IsArray(choices);
    for (int i = 0; how; i++) {
        if (i == sizeof normalize / sizeof normalize[0])
            return bad_task(r, "normalize: none, tokens or bytes was expected", err);
        if (cJSON_IsString(how) && strcmp(how->valuestring, normalize[i]) == 0) {
            r->ret->normalize = (qc_normalize)i;
            break;
        }
    }
    r->ret->name = qc_strdup(name->valuestring);
    return r->ret->name ? QC_OK : qc_fail_nomem(err, "task", 64);
}

static int load_rows(reader *r, const char *data, qc_err *err)
{
    char *text = NULL;
    size_t n_bytes, bad, n = strlen(data);
    bool jsonl = n > 6 && strcmp(data + n - 6, ".jsonl") == 0;
    QC_TRY(qc_file_read(data, MAX_DATA_BYTES, &text, &n_bytes, err));
    cJSON *rows = cJSON_CreateArray();
    int rc = rows ? QC_OK : qc_fail_nomem(err, "rows", 64);
    if (rc == QC_OK && !qc_utf8_valid(text, n_bytes, &bad))
        rc = qc_fail(err, QC_E_INPUT, "%s: invalid UTF-8 at byte %zu", data, bad);
    if (rc == QC_OK && memchr(text, 0, n_bytes))
        rc = qc_fail(err, QC_E_INPUT, "%s: a NUL byte", data);
    if (rc == QC_OK)
        rc = (jsonl ? read_jsonl : read_csv)(r, text, n_bytes, rows, err);
    if (rc == QC_OK)
        rc = add_items(r, rows, err);
    if (rc == QC_OK)
        rc = qc_sha256_buffer(text, n_bytes, r->ret->data_sha256, err);
    cJSON_Delete(rows);
    qc_free(text);
    return rc;
}

int qc_task_load(const char *task, const char *data, int64_t n_items, qc_task *ret, qc_err *err)
{
    cJSON *doc;
    *ret = (qc_task){0};
    if (strcmp(task, "ag_news") == 0)
        QC_TRY(qc_json_parse(ag_news, strlen(ag_news), task, true, &doc, err));
    else
        QC_TRY(qc_json_load(task, MAX_TASK_BYTES, true, &doc, err));
    reader r = {.task = doc, .task_name = task, .data_name = data, .ret = ret, .n_wanted = n_items};
    int rc = check_task(&r, err);
    if (rc == QC_OK)
        rc = load_rows(&r, data, err);
    if (rc == QC_OK)
        rc = add_content_free(&r, err);
    cJSON_Delete(doc);
    if (rc < 0)
        qc_task_clear(ret);
    return rc;
}

void qc_task_clear(qc_task *task)
{
    for (int64_t i = 0; task->items && i < task->n_items; i++)
        item_clear(&task->items[i]);
    for (int i = 0; i < task->n_content_free; i++)
        item_clear(&task->content_free[i]);
    qc_free(task->items);
    qc_free(task->content_free);
    qc_free(task->name);
    *task = (qc_task){0};
}
