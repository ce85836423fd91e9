#include "gates_file.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "schema.h"

#include <string.h>

#define MAX_FILE_BYTES ((size_t)1 << 20)

static int add_rule(qc_gates_file *file, const qc_node *node, bool to_baseline, qc_err *err)
{
    qc_gate_rule rule = {.name = node->key, .to_baseline = to_baseline};
    size_t n = strlen(node->key);
    bool is_size = !to_baseline && n > 6 && strcmp(node->key + n - 6, "_bytes") == 0;
    uint64_t n_bytes = 0;
    qc_err why;
    if (node->kind != QC_NODE_SCALAR)
        return qc_node_fail(node->at, err, "%.60s: a number is expected", node->key);
    int rc =
        is_size ? qc_parse_size(node->text, &n_bytes, &why) : qc_parse_float(node->text, &rule.limit, &why);
    if (is_size)
        rule.limit = (double)n_bytes;
    if (rc == QC_OK)
        rc = qc_gate_rule_check(&rule, &why);
    if (rc < 0)
        return qc_node_fail(node->at, err, "%.60s: %s", node->key, why.msg);
    file->list[file->rules.n_rules++] = rule;
    return QC_OK;
}

static int read_gates(qc_gates_file *file, const qc_node *map, bool to_baseline, qc_err *err)
{
    if (map->kind != QC_NODE_MAP)
        return qc_node_fail(map->at, err, "%.60s: a mapping of gates to numbers is expected", map->key);
    for (const qc_node *n = map->first; n; n = n->next)
        QC_TRY(add_rule(file, n, to_baseline, err));
    return QC_OK;
}

static int read_confidence(const qc_node *node, double *ret, qc_err *err)
{
    qc_err why;
    if (node->kind != QC_NODE_SCALAR || qc_parse_float(node->text, ret, &why) < 0 ||
        !(*ret > 0.5 && *ret < 1))
        return qc_node_fail(node->at, err, "confidence: a number above 0.5 and below 1 is expected");
    return QC_OK;
}

static int read_undecided(const qc_node *node, bool *ret, qc_err *err)
{
    int word = node->kind == QC_NODE_SCALAR ? qc_word_find("fail|pass", node->text) : -1;
    if (word < 0)
        return qc_node_fail(node->at, err, "undecided: fail or pass is expected");
    *ret = word == 1;
    return QC_OK;
}

static int read_key(qc_gates_file *file, const qc_node *node, qc_err *err)
{
    if (strcmp(node->key, "limits") == 0 || strcmp(node->key, "baseline") == 0)
        return read_gates(file, node, *node->key == 'b', err);
    if (strcmp(node->key, "confidence") == 0)
        return read_confidence(node, &file->rules.confidence, err);
    if (strcmp(node->key, "undecided") == 0)
        return read_undecided(node, &file->rules.undecided_passes, err);
    return qc_node_fail(node->key_at, err, "unknown key '%.60s' (limits, baseline, confidence, undecided)",
                        node->key);
}

static int read_tree(qc_gates_file *file, const char *path, qc_err *err)
{
    size_t n = 0;
    for (const qc_node *k = file->root->first; k; k = k->next)
        n += (size_t)k->n_children;
    if (!(file->list = qc_calloc(n + 1, sizeof *file->list)))
        return qc_fail_nomem(err, "gates", n * sizeof *file->list);
    for (const qc_node *k = file->root->first; k; k = k->next)
        QC_TRY(read_key(file, k, err));
    file->rules.rules = file->list;
    return file->rules.n_rules ? QC_OK : qc_fail(err, QC_E_INPUT, "%s: names no gate", path);
}

int qc_gates_file_load(const char *path, qc_gates_file *ret, qc_err *err)
{
    char *text;
    size_t n_bytes;
    qc_gates_file file = {.rules = {.confidence = 0.95}};
    QC_TRY(qc_file_read(path, MAX_FILE_BYTES, &text, &n_bytes, err));
    int rc = qc_node_parse(text, n_bytes, (qc_origin){.name = path, .line = 1, .column = 1}, false,
                           &file.root, err);
    qc_free(text);
    if (rc == QC_OK)
        rc = read_tree(&file, path, err);
    if (rc == QC_OK)
        *ret = file;
    else
        qc_gates_file_clear(&file);
    return rc;
}

void qc_gates_file_clear(qc_gates_file *file)
{
    qc_node_free(file->root);
    qc_free(file->list);
    *file = (qc_gates_file){0};
}
