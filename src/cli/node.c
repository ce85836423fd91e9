#include "node.h"

#include "qc_alloc.h"
#include "qc_json.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <yaml.h>

#define MAX_DEPTH    16
#define MAX_CHILDREN 4096 /* siblings are searched in order: keeps hostile files cheap */

int qc_node_fail(qc_origin at, qc_err *err, const char *fmt, ...)
{
    char text[QC_ERR_MSG_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (at.line == 0)
        return qc_fail(err, QC_E_USAGE, "--%s: %s", at.name, text);
    return qc_fail(err, QC_E_INPUT, "%s:%d:%d: %s", at.name, at.line, at.column, text);
}

qc_node *qc_node_new(qc_node_kind kind, qc_origin at)
{
    qc_node *node = qc_calloc(1, sizeof *node);
    if (node) {
        node->kind = kind;
        node->at = node->key_at = at;
    }
    return node;
}

qc_node *qc_node_scalar(const char *text, size_t n_bytes, qc_origin at)
{
    qc_node *node = qc_node_new(QC_NODE_SCALAR, at);
    if (node && !(node->text = qc_strndup(text, n_bytes))) {
        qc_free(node);
        return NULL;
    }
    if (node)
        node->plain = true;
    return node;
}

void qc_node_free(qc_node *node)
{
    if (!node)
        return;
    for (qc_node *c = node->first, *next; c; c = next) {
        next = c->next;
        qc_node_free(c);
    }
    qc_free(node->key);
    qc_free(node->text);
    qc_free(node);
}

qc_node *qc_node_child(const qc_node *map, const char *key, size_t key_bytes)
{
    for (qc_node *c = map->first; c; c = c->next)
        if (c->key && strlen(c->key) == key_bytes && memcmp(c->key, key, key_bytes) == 0)
            return c;
    return NULL;
}

qc_node *qc_node_at(const qc_node *list, int index)
{
    qc_node *c = list->first;
    while (c && index-- > 0)
        c = c->next;
    return c;
}

int qc_node_add(qc_node *parent, const char *key, size_t key_bytes, qc_node *child, qc_err *err)
{
    if (parent->n_children >= MAX_CHILDREN) {
        int rc = qc_node_fail(child->at, err, "more than %d entries", MAX_CHILDREN);
        qc_node_free(child);
        return rc;
    }
    if (key && !(child->key = qc_strndup(key, key_bytes))) {
        qc_node_free(child);
        return qc_fail_nomem(err, "recipe", key_bytes);
    }
    qc_node **link = &parent->first;
    while (*link)
        link = &(*link)->next;
    *link = child;
    parent->n_children++;
    return QC_OK;
}

/* ---- YAML ---- */

typedef struct reader {
    yaml_parser_t parser;
    yaml_event_t event; /* the current one */
    const char *name;
    int line0; /* 0: the text comes from an option, places are not shown */
} reader;

static qc_origin place(const reader *r, yaml_mark_t mark)
{
    if (r->line0 == 0)
        return (qc_origin){r->name, 0, 0};
    return (qc_origin){r->name, (int)mark.line + 1, (int)mark.column + 1};
}

static int next_event(reader *r, qc_err *err)
{
    yaml_event_delete(&r->event);
    memset(&r->event, 0, sizeof r->event);
    if (yaml_parser_parse(&r->parser, &r->event))
        return QC_OK;
    if (r->parser.error == YAML_MEMORY_ERROR)
        return qc_fail_nomem(err, r->name, 0);
    return qc_node_fail(place(r, r->parser.problem_mark), err, "%s",
                        r->parser.problem ? r->parser.problem : "yaml syntax error");
}

/* Anchors and tags of the current event. */
static int check_plain(const reader *r, qc_err *err)
{
    const yaml_event_t *e = &r->event;
    const yaml_char_t *anchor = NULL, *tag = NULL;
    if (e->type == YAML_SCALAR_EVENT)
        anchor = e->data.scalar.anchor, tag = e->data.scalar.tag;
    else if (e->type == YAML_SEQUENCE_START_EVENT)
        anchor = e->data.sequence_start.anchor, tag = e->data.sequence_start.tag;
    else if (e->type == YAML_MAPPING_START_EVENT)
        anchor = e->data.mapping_start.anchor, tag = e->data.mapping_start.tag;
    if (e->type == YAML_ALIAS_EVENT || anchor)
        return qc_node_fail(
            place(r, e->start_mark), err,
            "anchors and aliases are not used in recipes (a text that begins with * or & needs quotes)");
    if (tag)
        return qc_node_fail(place(r, e->start_mark), err,
                            "tags are not used in recipes (a text that begins with ! needs quotes)");
    return QC_OK;
}

static int read_scalar(reader *r, qc_node **ret, qc_err *err)
{
    const yaml_event_t *e = &r->event;
    const char *text = (const char *)e->data.scalar.value;
    qc_origin at = place(r, e->start_mark);
    if (strlen(text) != e->data.scalar.length)
        return qc_node_fail(at, err, "NUL character in a text");
    qc_node *node = qc_node_scalar(text, e->data.scalar.length, at);
    if (!node)
        return qc_fail_nomem(err, "recipe", e->data.scalar.length);
    node->plain = e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    *ret = node;
    return QC_OK;
}

static int read_node(reader *r, int depth, qc_node **ret, qc_err *err);

static int read_pair(reader *r, int depth, qc_node *map, qc_err *err)
{
    qc_node *key = NULL, *value = NULL;
    qc_origin at = place(r, r->event.start_mark);
    QC_TRY(check_plain(r, err));
    if (r->event.type != YAML_SCALAR_EVENT)
        return qc_node_fail(at, err, "a key must be a word");
    QC_TRY(read_scalar(r, &key, err));
    qc_node *same = qc_node_child(map, key->text, strlen(key->text));
    int rc = QC_OK;
    if (same)
        rc = qc_node_fail(at, err, "duplicate key '%.60s' (first on line %d)", key->text, same->key_at.line);
    if (rc == QC_OK)
        rc = next_event(r, err);
    if (rc == QC_OK)
        rc = read_node(r, depth, &value, err);
    if (rc == QC_OK) {
        value->key_at = at;
        rc = qc_node_add(map, key->text, strlen(key->text), value, err);
    }
    qc_node_free(key);
    return rc;
}

/* The current event starts a node; afterwards the current event is its last one. */
static int read_node(reader *r, int depth, qc_node **ret, qc_err *err)
{
    QC_TRY(check_plain(r, err));
    if (r->event.type == YAML_SCALAR_EVENT)
        return read_scalar(r, ret, err);
    bool map = r->event.type == YAML_MAPPING_START_EVENT;
    qc_origin at = place(r, r->event.start_mark);
    if (depth >= MAX_DEPTH)
        return qc_node_fail(at, err, "nested deeper than %d", MAX_DEPTH);
    qc_node *node = qc_node_new(map ? QC_NODE_MAP : QC_NODE_LIST, at);
    if (!node)
        return qc_fail_nomem(err, "recipe", sizeof *node);
    yaml_event_type_t end = map ? YAML_MAPPING_END_EVENT : YAML_SEQUENCE_END_EVENT;
    int rc;
    while ((rc = next_event(r, err)) == QC_OK && r->event.type != end) {
        qc_node *child = NULL;
        if (map) {
            rc = read_pair(r, depth + 1, node, err);
        } else {
            rc = read_node(r, depth + 1, &child, err);
            if (rc == QC_OK)
                rc = qc_node_add(node, NULL, 0, child, err);
        }
        if (rc < 0)
            break;
    }
    if (rc < 0)
        qc_node_free(node);
    else
        *ret = node;
    return rc;
}

static int read_document(reader *r, bool any_kind, qc_node **ret, qc_err *err)
{
    QC_TRY(next_event(r, err)); /* stream start */
    QC_TRY(next_event(r, err));
    if (r->event.type == YAML_STREAM_END_EVENT)
        return qc_fail(err, QC_E_INPUT, "%s: empty file, a mapping of keys to values (KEY: VALUE) expected",
                       r->name);
    QC_TRY(next_event(r, err));
    qc_node *node = NULL;
    QC_TRY(read_node(r, 0, &node, err));
    int rc = QC_OK;
    if (!any_kind && node->kind != QC_NODE_MAP)
        rc = qc_node_fail(node->at, err, "a mapping of keys to values (KEY: VALUE) expected");
    if (rc == QC_OK)
        rc = next_event(r, err); /* document end */
    if (rc == QC_OK)
        rc = next_event(r, err);
    if (rc == QC_OK && r->event.type != YAML_STREAM_END_EVENT)
        rc = qc_node_fail(place(r, r->event.start_mark), err, "a second document: a recipe is one");
    if (rc < 0)
        qc_node_free(node);
    else
        *ret = node;
    return rc;
}

/* What libyaml would pass over or report less clearly. */
static int check_text(const char *text, size_t n_bytes, qc_origin origin, qc_err *err)
{
    size_t bad;
    const char *nul = memchr(text, 0, n_bytes);
    bool valid = qc_utf8_valid(text, n_bytes, &bad);
    if (valid && !nul)
        return QC_OK;
    if (nul && (valid || (size_t)(nul - text) < bad))
        bad = (size_t)(nul - text);
    else
        nul = NULL;
    origin.column = 1;
    for (size_t i = 0; i < bad; i++) {
        origin.column = text[i] == '\n' ? 1 : origin.column + 1;
        origin.line += text[i] == '\n' && origin.line > 0;
    }
    return qc_node_fail(origin, err, nul ? "NUL character in the file" : "invalid UTF-8");
}

int qc_node_parse(const char *text, size_t n_bytes, qc_origin origin, bool any_kind, qc_node **ret,
                  qc_err *err)
{
    QC_TRY(check_text(text, n_bytes, origin, err));
    reader r = {.name = origin.name, .line0 = origin.line};
    if (!yaml_parser_initialize(&r.parser))
        return qc_fail_nomem(err, "yaml parser", sizeof r.parser);
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, n_bytes);
    int rc = read_document(&r, any_kind, ret, err);
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
    return rc;
}

/* ---- edits ---- */

/* Turn a node into an empty mapping or list unless it is one. */
static void make_container(qc_node *node, qc_node_kind kind, qc_origin at)
{
    if (node->kind == kind)
        return;
    for (qc_node *c = node->first, *next; c; c = next) {
        next = c->next;
        qc_node_free(c);
    }
    qc_free(node->text);
    node->text = NULL;
    node->first = NULL;
    node->n_children = 0;
    node->kind = kind;
    node->at = at;
}

/* One step of a path: a name, or an index as digits or in brackets. */
typedef struct step {
    const char *name;
    size_t n_bytes;
    bool is_index;
} step;

static const char *next_step(const char *path, step *ret)
{
    if (*path == '[') {
        size_t n = strspn(path + 1, "0123456789");
        *ret = (step){path + 1, n, true};
        return n > 0 && path[n + 1] == ']' ? path + n + 2 : NULL;
    }
    path += *path == '.';
    size_t n = strcspn(path, ".[");
    *ret = (step){path, n, n > 0 && strspn(path, "0123456789") == n};
    return n > 0 ? path + n : NULL;
}

static qc_node *find_step(const qc_node *node, const step *s, int *ret_index)
{
    if (!s->is_index)
        return qc_node_child(node, s->name, s->n_bytes);
    int64_t index = 0;
    for (size_t i = 0; i < s->n_bytes && index < 1000000; i++)
        index = index * 10 + (s->name[i] - '0');
    *ret_index = (int)index;
    return qc_node_at(node, (int)index);
}

/* Put a copy-free replacement in the place of `old`. */
static void replace(qc_node *parent, qc_node *old, qc_node *value)
{
    qc_node **link = &parent->first;
    while (*link != old)
        link = &(*link)->next;
    value->next = old->next;
    value->key = old->key;
    old->key = NULL;
    *link = value;
    qc_node_free(old);
}

int qc_node_set(qc_node *root, const char *path, qc_node *value, qc_err *err)
{
    const char *rest = path;
    qc_node *node = root;
    int depth = 0;
    for (;;) {
        step s;
        int index = 0;
        rest = next_step(rest, &s);
        if (!rest || depth++ > MAX_DEPTH) {
            int rc = qc_node_fail(value->at, err, "'%.80s' is not a key path such as verify.windows", path);
            qc_node_free(value);
            return rc;
        }
        make_container(node, s.is_index ? QC_NODE_LIST : QC_NODE_MAP, value->at);
        qc_node *child = find_step(node, &s, &index);
        if (!child && s.is_index && index != node->n_children) {
            int rc = qc_node_fail(value->at, err, "%.*s: index %.*s of a list of %d",
                                  (int)(s.name - path - 1), path, (int)s.n_bytes, s.name, node->n_children);
            qc_node_free(value);
            return rc;
        }
        if (!*rest && child) {
            replace(node, child, value);
            return QC_OK;
        }
        if (!*rest)
            return qc_node_add(node, s.is_index ? NULL : s.name, s.n_bytes, value, err);
        if (!child) {
            child = qc_node_new(QC_NODE_MAP, value->at);
            int rc = child ? qc_node_add(node, s.is_index ? NULL : s.name, s.n_bytes, child, err)
                           : qc_fail_nomem(err, "recipe", sizeof *child);
            if (rc < 0) {
                qc_node_free(value);
                return rc;
            }
        }
        node = child;
    }
}
