/* A recipe as written: tree of mappings, lists and scalars with their places, before the schema is applied.
 * Flags are edits of this tree, so that file, --set and short flags take one way. */
#ifndef QC_CLI_NODE_H
#define QC_CLI_NODE_H

#include "qc_err.h"

#include <stdbool.h>
#include <stddef.h>

typedef enum { QC_NODE_SCALAR, QC_NODE_MAP, QC_NODE_LIST } qc_node_kind;

/* Where something was written: file, line and column from 1, or an option (line 0). */
typedef struct qc_origin {
    const char *name; /* file name, or option without dashes; borrowed */
    int line, column;
} qc_origin;

typedef struct qc_node qc_node;
struct qc_node {
    qc_node_kind kind;
    char *key;  /* in a mapping; owned */
    char *text; /* of a scalar; owned */
    bool plain; /* scalar without quotes: may mean null */
    qc_origin key_at, at;
    qc_node *first, *next; /* children; siblings */
    int n_children;
};

/* Parse one YAML document. Refused with QC_E_INPUT and file:line:column: syntax errors, invalid UTF-8, NUL,
 * anchors, aliases and tags (a recipe needs none, and they can blow up), keys that are no strings or occur
 * twice, nesting over 16, more than one document, an empty file, a top level that is no mapping unless
 * any_kind. */
int qc_node_parse(const char *text, size_t n_bytes, qc_origin origin, bool any_kind, qc_node **ret,
                  qc_err *err) QC_WARN_UNUSED;

/* Put `value` (taken over, also on failure) at a path of keys and indices ("a.b.0.c", "a.b[0].c"), making
 * what is missing on the way and replacing what stands there. An index one past the end appends. QC_E_USAGE.
 */
int qc_node_set(qc_node *root, const char *path, qc_node *value, qc_err *err) QC_WARN_UNUSED;

/* New nodes; NULL when out of memory. */
qc_node *qc_node_new(qc_node_kind kind, qc_origin at);
qc_node *qc_node_scalar(const char *text, size_t n_bytes, qc_origin at);

/* Add a child (taken over) at the end; `key` is copied, NULL in a list. On failure the child is freed. */
int qc_node_add(qc_node *parent, const char *key, size_t key_bytes, qc_node *child,
                qc_err *err) QC_WARN_UNUSED;

/* Child by key / by index; NULL if there is none. */
qc_node *qc_node_child(const qc_node *map, const char *key, size_t key_bytes);
qc_node *qc_node_at(const qc_node *list, int index);

/* NULL is fine. */
void qc_node_free(qc_node *node);

/* Record a failure with its place in front: "recipe.yaml:3:5: ..." (QC_E_INPUT) or "--bits: ..."
 * (QC_E_USAGE). */
int qc_node_fail(qc_origin at, qc_err *err, const char *fmt, ...) QC_PRINTF(3, 4);

#endif
