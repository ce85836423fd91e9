#include "recipe.h"

#include "node.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "schema.h"

#include <stdio.h>
#include <string.h>

#define MAX_RECIPE_BYTES (1u << 20)
#define MAX_PATH_BYTES   256

/* State of one pass over the tree. */
typedef struct binder {
    const char *folder;        /* of the file; NULL = leave paths alone */
    char path[MAX_PATH_BYTES]; /* of the key at hand, for messages */
    qc_err later;              /* first known but unsupported value */
} binder;

/* Keys grow at the end of b->path; the caller cuts it back to the length returned. */
static size_t push_path(binder *b, const char *name, int index)
{
    size_t n = strlen(b->path);
    if (name)
        snprintf(b->path + n, sizeof b->path - n, "%s%s", n ? "." : "", name);
    else
        snprintf(b->path + n, sizeof b->path - n, "[%d]", index);
    return n;
}

/* A plain empty scalar, ~ or null: as if the key were absent. */
static bool is_null(const qc_node *node)
{
    return node->kind == QC_NODE_SCALAR && node->plain &&
           (!*node->text || strcmp(node->text, "~") == 0 || strcmp(node->text, "null") == 0);
}

static void *field_of(const qc_key *key, void *base)
{
    return (char *)base + key->offset;
}

/* ---- defaults and clearing ---- */

static int set_defaults(const qc_key *table, void *base, qc_err *err)
{
    for (const qc_key *key = table; key->name; key++) {
        if (key->type == QC_KEY_MAP && !key->optional)
            QC_TRY(set_defaults(key->sub, field_of(key, base), err));
        else if (key->type == QC_KEY_BOOL && key->field_bytes == sizeof(int))
            *(int *)field_of(key, base) = -1;
        if (key->deflt)
            QC_TRY(qc_key_store(key, key->deflt, NULL, field_of(key, base), err));
    }
    return QC_OK;
}

static void clear_table(const qc_key *table, void *base);

static void clear_array(const qc_key *key, void *base)
{
    char *array = *(char **)field_of(key, base);
    int n = *(int *)((char *)base + key->aux_offset);
    for (int i = 0; i < n; i++)
        if (key->type == QC_KEY_LIMITS)
            qc_free(((qc_limit *)(void *)array)[i].name);
        else if (key->sub)
            clear_table(key->sub, array + (size_t)i * key->elem_bytes);
        else
            qc_free(((char **)(void *)array)[i]);
    qc_free(array);
}

static void clear_table(const qc_key *table, void *base)
{
    for (const qc_key *key = table; key->name; key++)
        if (key->type == QC_KEY_STRING || key->type == QC_KEY_PATH)
            qc_free(*(char **)field_of(key, base));
        else if (key->type == QC_KEY_MAP)
            clear_table(key->sub, field_of(key, base));
        else if (key->type == QC_KEY_LIST || key->type == QC_KEY_LIMITS)
            clear_array(key, base);
}

void qc_recipe_clear(qc_recipe *recipe)
{
    clear_table(qc_schema, recipe);
    qc_free(recipe->file);
    memset(recipe, 0, sizeof *recipe);
}

/* ---- from the tree to the struct ---- */

static int bind_map(binder *b, const qc_key *table, const qc_node *node, void *base, qc_err *err);

/* Remember the first use of something that is known but not built. */
static void refuse_later(binder *b, const qc_key *key, const qc_node *node)
{
    if (b->later.code != QC_OK)
        return;
    qc_node_fail(node->at, &b->later, "%s: '%.60s' is not supported yet (supported: %s)", b->path, node->text,
                 key->now);
    b->later.code = QC_E_UNSUPPORTED;
}

static bool is_later(const qc_key *key, const qc_node *node)
{
    return key->now && qc_word_find(key->now, node->text) < 0;
}

static int bind_scalar(binder *b, const qc_key *key, const qc_node *node, void *base, qc_err *err)
{
    qc_err why;
    qc_buf type = {0};
    void *field = field_of(key, base);
    if (node->kind != QC_NODE_SCALAR) {
        QC_TRY(qc_key_describe(key, &type, err));
        int rc = qc_node_fail(node->at, err, "%s: a %s where %s is expected", b->path,
                              node->kind == QC_NODE_MAP ? "mapping" : "list", type.data);
        qc_buf_clear(&type);
        return rc;
    }
    int rc = qc_key_store(key, node->text, node->at.line > 0 ? b->folder : NULL, field, &why);
    if (rc == QC_E_RESOURCE)
        return qc_fail(err, rc, "%s", why.msg);
    if (rc < 0)
        return qc_node_fail(node->at, err, "%s: %s", b->path, why.msg);
    if (is_later(key, node))
        refuse_later(b, key, node);
    return QC_OK;
}

static int unknown_limit(const binder *b, const qc_key *key, const qc_node *child, qc_err *err)
{
    qc_buf type = {0};
    QC_TRY(qc_key_describe(key, &type, err));
    int rc = qc_node_fail(child->key_at, err, "%s: unknown name '%.60s' (%s expected)", b->path, child->key,
                          type.data);
    qc_buf_clear(&type);
    return rc;
}

static int bind_limit(const binder *b, const qc_key *key, const qc_node *child, qc_limit *ret, qc_err *err)
{
    qc_err why;
    uint64_t n_bytes;
    size_t n = strlen(child->key);
    bool is_size = n > 6 && strcmp(child->key + n - 6, "_bytes") == 0;
    if (qc_word_find(key->words, child->key) < 0)
        return unknown_limit(b, key, child, err);
    if (child->kind != QC_NODE_SCALAR)
        return qc_node_fail(child->at, err, "%s.%s: a number is expected", b->path, child->key);
    int rc =
        is_size ? qc_parse_size(child->text, &n_bytes, &why) : qc_parse_float(child->text, &ret->limit, &why);
    if (rc < 0)
        return qc_node_fail(child->at, err, "%s.%s: %s", b->path, child->key, why.msg);
    if (is_size)
        ret->limit = (double)n_bytes;
    if (!(ret->name = qc_strdup(child->key)))
        return qc_fail_nomem(err, "recipe", n);
    return QC_OK;
}

static int bind_element(binder *b, const qc_key *key, const qc_node *child, char *elem, qc_err *err)
{
    if (key->type == QC_KEY_LIMITS)
        return bind_limit(b, key, child, (qc_limit *)(void *)elem, err);
    if (key->sub) {
        if (child->kind != QC_NODE_MAP)
            return qc_node_fail(child->at, err, "%s: a mapping is expected", b->path);
        QC_TRY(set_defaults(key->sub, elem, err));
        return bind_map(b, key->sub, child, elem, err);
    }
    if (child->kind != QC_NODE_SCALAR || is_null(child) || !*child->text)
        return qc_node_fail(child->at, err, "%s: a string is expected", b->path);
    if (!(*(char **)(void *)elem = qc_strdup(child->text)))
        return qc_fail_nomem(err, "recipe", strlen(child->text));
    return QC_OK;
}

static int bind_array(binder *b, const qc_key *key, const qc_node *node, void *base, qc_err *err)
{
    bool limits = key->type == QC_KEY_LIMITS;
    size_t elem_bytes = limits ? sizeof(qc_limit) : key->elem_bytes;
    int *n = (int *)(void *)((char *)base + key->aux_offset);
    if (node->kind != (limits ? QC_NODE_MAP : QC_NODE_LIST))
        return qc_node_fail(node->at, err, "%s: a %s is expected", b->path, limits ? "mapping" : "list");
    char *array = qc_calloc((size_t)node->n_children, elem_bytes);
    if (!array)
        return qc_fail_nomem(err, "recipe", (size_t)node->n_children * elem_bytes);
    *(char **)field_of(key, base) = array;
    int i = 0;
    for (const qc_node *c = node->first; c; c = c->next, i++) {
        if (limits && is_null(c))
            continue;
        char *elem = array + (size_t)(*n)++ * elem_bytes;
        size_t cut = limits ? strlen(b->path) : push_path(b, NULL, i);
        QC_TRY(bind_element(b, key, c, elem, err));
        b->path[cut] = 0;
    }
    return QC_OK;
}

static int bind_key(binder *b, const qc_key *key, const qc_node *node, void *base, qc_err *err)
{
    if (is_null(node))
        return key->required ? qc_node_fail(node->at, err, "%s: a value is needed", b->path) : QC_OK;
    if (key->type == QC_KEY_LIST || key->type == QC_KEY_LIMITS)
        return bind_array(b, key, node, base, err);
    if (key->type != QC_KEY_MAP)
        return bind_scalar(b, key, node, base, err);
    if (key->words && node->kind == QC_NODE_SCALAR && strcmp(node->text, key->words) == 0)
        return QC_OK;
    if (node->kind != QC_NODE_MAP)
        return qc_node_fail(node->at, err, "%s: a mapping%s%s is expected", b->path, key->words ? " or " : "",
                            key->words ? key->words : "");
    if (key->optional) {
        *(bool *)((char *)base + key->aux_offset) = true;
        QC_TRY(set_defaults(key->sub, field_of(key, base), err));
    }
    return bind_map(b, key->sub, node, field_of(key, base), err);
}

static const char *key_name_at(const void *table, int i)
{
    return ((const qc_key *)table)[i].name;
}

/* Path of the first key of this name anywhere below `table`, for "did you mean". */
static bool find_elsewhere(const qc_key *table, const char *name, char *path, size_t path_bytes)
{
    size_t n = strlen(path);
    for (const qc_key *key = table; key->name; key++) {
        snprintf(path + n, path_bytes - n, "%s%s", n ? "." : "", key->name);
        if (strcmp(key->name, name) == 0 || (key->sub && find_elsewhere(key->sub, name, path, path_bytes)))
            return true;
        path[n] = 0;
    }
    return false;
}

static int unknown_key(const binder *b, const qc_key *table, const qc_node *child, qc_err *err)
{
    char elsewhere[MAX_PATH_BYTES] = "";
    int n_keys = 0;
    while (table[n_keys].name)
        n_keys++;
    const char *near = qc_nearest(child->key, key_name_at, table, n_keys);
    if (!near && find_elsewhere(qc_schema, child->key, elsewhere, sizeof elsewhere))
        near = elsewhere;
    return qc_node_fail(child->key_at, err, "unknown key '%s%s%.60s'%s%s%s", b->path, *b->path ? "." : "",
                        child->key, near ? " (did you mean '" : "", near ? near : "", near ? "'?)" : "");
}

static int bind_map(binder *b, const qc_key *table, const qc_node *node, void *base, qc_err *err)
{
    for (const qc_node *c = node->first; c; c = c->next) {
        const qc_key *key = table;
        while (key->name && strcmp(key->name, c->key) != 0)
            key++;
        if (!key->name)
            return unknown_key(b, table, c, err);
        size_t cut = push_path(b, key->name, 0);
        QC_TRY(bind_key(b, key, c, base, err));
        b->path[cut] = 0;
    }
    for (const qc_key *key = table; key->name; key++) {
        if (key->required && !qc_node_child(node, key->name, strlen(key->name)))
            return qc_node_fail(node->at, err, "%s: '%s' is missing", b->path, key->name);
        if (key->selector && !node->first->next)
            return qc_node_fail(node->at, err, "%s: '%s' alone sets nothing", b->path, key->name);
    }
    return QC_OK;
}

/* ---- flags ---- */

/* Value of --set: YAML where it begins like a list or mapping, else the text as it stands. */
static int set_value(const char *text, qc_origin at, qc_node **ret, qc_err *err)
{
    if (*text == '[' || *text == '{')
        return qc_node_parse(text, strlen(text), at, true, ret, err);
    *ret = qc_node_scalar(text, strlen(text), at);
    return *ret ? QC_OK : qc_fail_nomem(err, "recipe", strlen(text));
}

/* PATH=VALUE, below `prefix` unless that is empty. */
static int apply_assignment(qc_node *root, const char *prefix, const char *text, qc_origin at, qc_err *err)
{
    const char *eq = strchr(text, '=');
    if (!eq || eq == text)
        return qc_node_fail(at, err, "'%.80s' is not NAME=VALUE", text);
    qc_node *value;
    QC_TRY(set_value(eq + 1, at, &value, err));
    char *path = qc_asprintf("%s%s%.*s", prefix, *prefix ? "." : "", (int)(eq - text), text);
    if (!path) {
        qc_node_free(value);
        return qc_fail_nomem(err, "recipe", strlen(text));
    }
    int rc = qc_node_set(root, path, value, err);
    qc_free(path);
    return rc;
}

/* FIRST:name=value,name=value: an element of a list of mappings; FIRST is its first key's. */
static int parse_element(const qc_key *key, const char *text, qc_origin at, qc_node **ret, qc_err *err)
{
    const char *colon = strrchr(text, ':');
    if (!colon || !colon[1])
        return qc_node_fail(at, err, "'%.80s' is not GLOB:name=value,...", text);
    size_t n = (size_t)(colon - text);
    qc_node *map = qc_node_new(QC_NODE_MAP, at), *first = qc_node_scalar(text, n, at);
    if (!map || !first) {
        qc_node_free(map);
        qc_node_free(first);
        return qc_fail_nomem(err, "recipe", n);
    }
    int rc = qc_node_add(map, key->sub->name, strlen(key->sub->name), first, err);
    for (const char *p = colon + 1; rc == QC_OK && *p;) {
        size_t n_pair = strcspn(p, ",");
        const char *eq = memchr(p, '=', n_pair);
        if (!eq) {
            rc = qc_node_fail(at, err, "'%.80s' is not GLOB:name=value,...", text);
            break;
        }
        qc_node *value = qc_node_scalar(eq + 1, (size_t)(p + n_pair - eq - 1), at);
        if (!value)
            rc = qc_fail_nomem(err, "recipe", n_pair);
        else if (qc_node_child(map, p, (size_t)(eq - p))) {
            rc = qc_node_fail(at, err, "'%.*s' is given twice", (int)(eq - p), p);
            qc_node_free(value);
        } else
            rc = qc_node_add(map, p, (size_t)(eq - p), value, err);
        p += n_pair + (p[n_pair] == ',');
    }
    if (rc < 0)
        qc_node_free(map);
    else
        *ret = map;
    return rc;
}

/* Index at which an element is appended to the list at `path`. */
static int list_end(const qc_node *root, const char *path)
{
    const qc_node *node = root;
    while (node && *path) {
        size_t n = strcspn(path, ".");
        node = qc_node_child(node, path, n);
        path += n + (path[n] == '.');
    }
    return node && node->kind == QC_NODE_LIST ? node->n_children : 0;
}

static int apply_list_flag(qc_node *root, const qc_key *key, const char *path, const char *text, qc_origin at,
                           qc_err *err)
{
    qc_node *value = NULL;
    if (key->sub)
        QC_TRY(parse_element(key, text, at, &value, err));
    else if (!(value = qc_node_scalar(text, strlen(text), at)))
        return qc_fail_nomem(err, "recipe", strlen(text));
    char elem_path[MAX_PATH_BYTES];
    snprintf(elem_path, sizeof elem_path, "%s.%d", path, list_end(root, path));
    return qc_node_set(root, elem_path, value, err);
}

static int apply_flag(qc_node *root, const qc_arg *arg, qc_err *err)
{
    qc_origin at = {.name = arg->opt->name};
    const char *path = arg->opt->key;
    const qc_key *key = *path ? qc_schema_find(path) : NULL;
    if (!key || key->type == QC_KEY_LIMITS)
        return apply_assignment(root, path, arg->value, at, err);
    if (key->type == QC_KEY_LIST)
        return apply_list_flag(root, key, path, arg->value, at, err);
    qc_node *value = qc_node_scalar(arg->value, strlen(arg->value), at);
    if (!value)
        return qc_fail_nomem(err, "recipe", strlen(arg->value));
    value->plain = false; /* --text '' is an empty path, not "no text" */
    return qc_node_set(root, path, value, err);
}

/* ---- whole recipes ---- */

const qc_writer_format *qc_recipe_format(const qc_recipe_emit *emit)
{
    char name[64];
    size_t n;
    const char *word = qc_word_at(qc_schema_find("emit.format")->words, emit->format, &n);
    snprintf(name, sizeof name, "%.*s", (int)n, word);
    return qc_writer_format_find(name);
}

/* The names of all formats, "qpk, gptq"; cut to ret_bytes. */
static void format_names(char *ret, size_t ret_bytes)
{
    size_t n = 0;
    const qc_writer_format *f;
    for (int i = 0; (f = qc_writer_format_at(i)) && n < ret_bytes; i++)
        n += (size_t)snprintf(ret + n, ret_bytes - n, "%s%s", i ? ", " : "", f->name);
}

/* Format of one output by extension where none was given, and its subtype. */
static int resolve_format(qc_recipe_emit *e, int i, qc_err *err)
{
    static const struct {
        const char *extension;
        qc_emit_format format;
    } known[] = {{".qpk", QC_EMIT_QPK}, {".gguf", QC_EMIT_GGUF}};
    char names[128];
    size_t n = strlen(e->path);
    format_names(names, sizeof names);
    for (size_t k = 0; k < sizeof known / sizeof known[0] && e->format == QC_EMIT_AUTO; k++)
        if (n > strlen(known[k].extension) &&
            strcmp(e->path + n - strlen(known[k].extension), known[k].extension) == 0)
            e->format = (int)known[k].format;
    if (e->format == QC_EMIT_AUTO)
        return qc_fail(err, QC_E_USAGE,
                       "emit[%d]: the extension of '%s' names no format; use .qpk or give the format (%s)", i,
                       e->path, names);
    const qc_writer_format *format = qc_recipe_format(e);
    if (e->type && (!format->types || qc_word_find(format->types, e->type) < 0))
        return qc_fail(err, QC_E_USAGE, "emit[%d].type: '%.40s' is no type of %s (%s)", i, e->type,
                       format->name, format->types ? format->types : "it has none");
    return QC_OK;
}

static int resolve_formats(qc_recipe *r, qc_err *err)
{
    for (int i = 0; i < r->n_emit; i++)
        QC_TRY(resolve_format(&r->emit[i], i, err));
    return QC_OK;
}

/* Statistics are those of the 16-bit model's inputs, whatever the default is. */
static void follow_statistics(qc_recipe *r)
{
    if (!r->calibration.statistics)
        return;
    r->quantize.gptq.inputs = 1;
    for (int i = 0; i < r->n_emit; i++)
        r->emit[i].quantize.gptq.inputs = 1;
}

static int build(qc_node *root, const char *folder, const qc_args *args, qc_recipe *ret, qc_err *err)
{
    binder b = {.folder = folder};
    for (int i = 0; args && i < args->n_list; i++)
        if (args->list[i].opt->key)
            QC_TRY(apply_flag(root, &args->list[i], err));
    qc_recipe r = {0};
    int rc = set_defaults(qc_schema, &r, err);
    if (rc == QC_OK)
        rc = bind_map(&b, qc_schema, root, &r, err);
    if (rc == QC_OK && b.later.code != QC_OK)
        rc = qc_fail(err, b.later.code, "%s", b.later.msg);
    if (rc == QC_OK)
        rc = resolve_formats(&r, err);
    r.asks_grid = qc_node_child(root, "quantize", strlen("quantize")) != NULL;
    follow_statistics(&r);
    if (rc == QC_OK)
        *ret = r;
    else
        qc_recipe_clear(&r);
    return rc;
}

int qc_recipe_parse(const char *text, size_t n_bytes, const char *name, const char *folder,
                    const qc_args *args, qc_recipe *ret, qc_err *err)
{
    qc_node *root;
    QC_TRY(qc_node_parse(text, n_bytes, (qc_origin){name, 1, 1}, false, &root, err));
    int rc = build(root, folder, args, ret, err);
    qc_node_free(root);
    return rc;
}

static bool is_recipe_name(const char *path)
{
    size_t n = strlen(path);
    return (n > 5 && strcmp(path + n - 5, ".yaml") == 0) || (n > 4 && strcmp(path + n - 4, ".yml") == 0);
}

static int load_file(const char *path, const qc_args *args, qc_recipe *ret, qc_err *err)
{
    char *text = NULL, *folder = NULL;
    size_t n_bytes;
    QC_TRY(qc_file_read(path, MAX_RECIPE_BYTES, &text, &n_bytes, err));
    int rc;
    if (!(folder = qc_path_dir(path)))
        rc = qc_fail_nomem(err, "path", strlen(path));
    else
        rc = qc_recipe_parse(text, n_bytes, path, strcmp(folder, ".") == 0 ? NULL : folder, args, ret, err);
    if (rc == QC_OK && !(ret->file = qc_strdup(path))) {
        qc_recipe_clear(ret);
        rc = qc_fail_nomem(err, path, strlen(path));
    }
    qc_free(folder);
    qc_free(text);
    return rc;
}

/* Without a file: an empty recipe with the operand as its model. */
static int load_flags(const char *model, const qc_args *args, qc_recipe *ret, qc_err *err)
{
    if (model && !*model)
        return qc_fail(err, QC_E_USAGE, "the path of the model is empty");
    qc_node *root = qc_node_new(QC_NODE_MAP, (qc_origin){"set", 0, 0});
    qc_node *name = model ? qc_node_scalar(model, strlen(model), (qc_origin){"model", 0, 0}) : NULL;
    int rc = root && (name || !model) ? QC_OK : qc_fail_nomem(err, "recipe", sizeof *root);
    if (rc == QC_OK && name) {
        name->plain = false;
        rc = qc_node_add(root, "model", 5, name, err);
    } else {
        qc_node_free(name);
    }
    if (rc == QC_OK)
        rc = build(root, NULL, args, ret, err);
    qc_node_free(root);
    return rc;
}

int qc_recipe_load(const qc_args *args, qc_recipe *ret, qc_err *err)
{
    const char *operand = args->n_operands > 0 ? args->operands[0] : NULL;
    qc_err why;
    int rc = operand && args->program->takes_recipe && is_recipe_name(operand)
                 ? load_file(operand, args, ret, &why)
                 : load_flags(operand, args, ret, &why);
    if (rc == QC_E_USAGE)
        return qc_args_fail(args->program, err, "%s", why.msg);
    return rc < 0 ? qc_fail(err, rc, "%s", why.msg) : QC_OK;
}

/* ---- JSON ---- */

static cJSON *table_json(const qc_key *table, const void *base, bool all);

static cJSON *int_json(const qc_key *key, const void *field)
{
    int64_t value = key->field_bytes == sizeof(int64_t) ? *(const int64_t *)field : *(const int *)field;
    if (value == 0 && !key->deflt)
        return cJSON_CreateNull();
    if (key->words && value == key->word_value &&
        !(key->word_value >= key->min && key->word_value <= key->max) &&
        strspn(key->words, "0123456789") != strlen(key->words))
        return cJSON_CreateString(key->words);
    return cJSON_CreateNumber((double)value);
}

static cJSON *scalar_json(const qc_key *key, const void *field)
{
    size_t n;
    char word[64];
    const char *text;
    switch (key->type) {
    case QC_KEY_BOOL:
        if (key->field_bytes == sizeof(int) && *(const int *)field < 0)
            return cJSON_CreateNull();
        return cJSON_CreateBool(key->field_bytes == sizeof(int) ? *(const int *)field : *(const bool *)field);
    case QC_KEY_INT:
        return int_json(key, field);
    case QC_KEY_FLOAT:
        if (key->words && *(const double *)field == (double)key->word_value)
            return cJSON_CreateString(key->words);
        return *(const double *)field == 0 && !key->deflt ? cJSON_CreateNull()
                                                          : cJSON_CreateNumber(*(const double *)field);
    case QC_KEY_SIZE:
        return *(const uint64_t *)field == 0 ? cJSON_CreateNull()
                                             : cJSON_CreateNumber((double)*(const uint64_t *)field);
    case QC_KEY_ENUM:
        text = qc_word_at(key->words, *(const int *)field, &n);
        snprintf(word, sizeof word, "%.*s", (int)n, text);
        return cJSON_CreateString(word);
    default:
        text = *(char *const *)field;
        return text ? cJSON_CreateString(text) : cJSON_CreateNull();
    }
}

static cJSON *limits_json(const qc_limit *limits, int n)
{
    cJSON *map = cJSON_CreateObject();
    for (int i = 0; map && i < n; i++)
        if (!cJSON_AddNumberToObject(map, limits[i].name, limits[i].limit)) {
            cJSON_Delete(map);
            return NULL;
        }
    return map;
}

static cJSON *list_json(const qc_key *key, const char *array, int n)
{
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; list && i < n; i++) {
        const char *elem = array + (size_t)i * key->elem_bytes;
        cJSON *item = key->sub ? table_json(key->sub, elem, true)
                               : cJSON_CreateString(*(char *const *)(const void *)elem);
        if (!item || !cJSON_AddItemToArray(list, item)) {
            cJSON_Delete(item);
            cJSON_Delete(list);
            return NULL;
        }
    }
    return list;
}

static cJSON *key_json(const qc_key *key, const void *base, bool all)
{
    const char *field = (const char *)base + key->offset;
    int n = key->aux_offset && key->type != QC_KEY_MAP
                ? *(const int *)(const void *)((const char *)base + key->aux_offset)
                : 0;
    if (key->type == QC_KEY_LIMITS)
        return limits_json(*(qc_limit *const *)(const void *)field, n);
    if (key->type == QC_KEY_LIST)
        return list_json(key, *(char *const *)(const void *)field, n);
    if (key->type != QC_KEY_MAP)
        return scalar_json(key, field);
    if (key->optional && !*(const bool *)((const char *)base + key->aux_offset))
        return cJSON_CreateNull();
    return table_json(key->sub, field, all);
}

/* Does the key, or something below it, decide bytes of artifacts? */
static bool has_artifact(const qc_key *key)
{
    if (key->artifact)
        return true;
    for (const qc_key *sub = key->type == QC_KEY_MAP ? key->sub : NULL; sub && sub->name; sub++)
        if (has_artifact(sub))
            return true;
    return false;
}

static cJSON *table_json(const qc_key *table, const void *base, bool all)
{
    cJSON *map = cJSON_CreateObject();
    for (const qc_key *key = table; map && key->name; key++) {
        if (!all && !has_artifact(key))
            continue;
        cJSON *item = key_json(key, base, all || key->artifact);
        if (!item || !cJSON_AddItemToObject(map, key->name, item)) {
            cJSON_Delete(item);
            cJSON_Delete(map);
            return NULL;
        }
    }
    return map;
}

cJSON *qc_recipe_to_json(const qc_recipe *recipe)
{
    return table_json(qc_schema, recipe, true);
}

cJSON *qc_recipe_artifact_json(const qc_recipe *recipe)
{
    return table_json(qc_schema, recipe, false);
}

cJSON *qc_recipe_quantize_json(const qc_recipe_quantize *quantize)
{
    return table_json(qc_schema_find("quantize")->sub, quantize, true);
}

/* ---- for quant/policy ---- */

static qc_grid affine(int bits, bool symmetric, int64_t group_elems, qc_dtype scale)
{
    return (qc_grid){.kind = QC_GRID_AFFINE,
                     .bits = bits,
                     .symmetric = symmetric,
                     .group_elems = group_elems,
                     .scale_dtype = scale};
}

void qc_recipe_policy(const qc_recipe_quantize *q, qc_dtype scale, qc_policy *ret)
{
    static const qc_dtype scale_dtypes[] = {
        [QC_SCALE_F32] = QC_DT_F32, [QC_SCALE_F16] = QC_DT_F16, [QC_SCALE_BF16] = QC_DT_BF16};
    if (q->weights.scale != QC_SCALE_AUTO)
        scale = scale_dtypes[q->weights.scale];
    *ret = (qc_policy){
        .weights = {.grid = affine(q->weights.bits, q->weights.symmetric, q->weights.group, scale),
                    .sym_rule = QC_SYM_FULL_RANGE,
                    .search = (qc_search)q->weights.search},
        .embedding = {.grid = affine(q->embedding.bits, q->embedding.symmetric, q->embedding.group, scale),
                      .sym_rule = QC_SYM_FULL_RANGE,
                      .search = (qc_search)q->weights.search},
        .quantize_embedding = q->embedding.bits < 16,
        .group_fallback = (qc_group_fallback)q->weights.group_fallback,
        .overrides = q->overrides,
        .n_overrides = q->n_overrides,
        .skip = q->skip,
        .n_skip = q->n_skip,
        .act_bits = q->activations.bits,
        .act_group = q->activations.group,
    };
}
