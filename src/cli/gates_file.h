/* Gates of `qreport gate` from a YAML file (docs/gates.md). */
#ifndef QC_CLI_GATES_FILE_H
#define QC_CLI_GATES_FILE_H

#include "node.h"
#include "verdict.h"

typedef struct qc_gates_file {
    qc_gate_rules rules; /* names are those of the tree */
    qc_gate_rule *list;  /* owned */
    qc_node *root;       /* owned */
} qc_gates_file;

/* QC_E_INPUT: file:line:column, key, what is wrong. Free with qc_gates_file_clear. */
int qc_gates_file_load(const char *path, qc_gates_file *ret, qc_err *err) QC_WARN_UNUSED;
void qc_gates_file_clear(qc_gates_file *file);

#endif
