/* Command lines. Each program has one table of options; parsing, --help and the man page are made from it.
 *
 * An option with a recipe key is a short way to set that key: type, unit, default and help come from the
 * recipe's schema (schema.h), its value is checked there (recipe.h). Other options belong to the program,
 * which asks qc_args for them. Options that every program has (--help, --version, -q, -v, --cpu-mask,
 * --progress) are added by this module. */
#ifndef QC_CLI_OPT_H
#define QC_CLI_OPT_H

#include "qc_buf.h"
#include "qc_err.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct qc_opt {
    const char *name;    /* long name without the dashes; NULL ends a table */
    char letter;         /* short form, 0 = none */
    const char *group;   /* heading in the help, in the first row of a group */
    const char *command; /* subcommands that take it, a|b, "PATH" = none given; NULL = any */
    const char *key;   /* recipe key that it sets ("" = any, given as KEY=VALUE); NULL = the program's own */
    const char *value; /* with key: a switch that sets this text */
    const char *arg;   /* name of its argument; NULL = a switch (with key: by the key's type) */
    const char *unit;  /* of the argument, NULL = none (with key: the schema's) */
    const char *deflt; /* default as text (with key: the schema's) */
    const char *help;  /* sentence part, lower case, no full stop (with key: the schema's) */
    bool later;        /* known, its feature is not built yet: using it is QC_E_UNSUPPORTED */
    bool hidden;       /* not in help and man page */
} qc_opt;

/* A pair of texts in help and man page: a subcommand with its job, an example with its comment. */
typedef struct qc_opt_note {
    const char *text; /* NULL ends a list */
    const char *help;
} qc_opt_note;

typedef struct qc_program {
    const char *name;
    const char *summary;         /* one line */
    const char *const *synopsis; /* argument forms without the program's name, NULL-terminated */
    const char *description;     /* paragraphs separated by a blank line */
    const qc_opt_note *commands; /* subcommands; NULL = none */
    const qc_opt *opts;
    const qc_opt_note *examples; /* whole command lines */
    int max_operands;            /* arguments that are not options, the subcommand not counted */
    bool judges;       /* exit code 1 is an answer: a gate failed, or things differ */
    bool takes_recipe; /* a first operand NAME.yaml or NAME.yml is a recipe, anything else a model */
} qc_program;

/* One option as it was given. */
typedef struct qc_arg {
    const qc_opt *opt;
    const char *value; /* points into argv; opt->value for a switch with a key, NULL for other switches */
} qc_arg;

typedef struct qc_args {
    const qc_program *program;
    const char *command; /* subcommand or NULL */
    qc_arg *list;        /* in the order of the command line; owned */
    int n_list;
    const char **operands; /* owned array of argv strings */
    int n_operands;
} qc_args;

/* Parse argv[1 .. argc - 1]: --name VALUE, --name=VALUE, -x VALUE, -xVALUE, -qv, -- ends options. A later
 * option wins. QC_E_USAGE: unknown option (the nearest is suggested), missing or unwanted argument, too many
 * operands; QC_E_UNSUPPORTED: an option whose feature is not built. With --help, --version or --man nothing
 * else is checked. */
int qc_args_parse(const qc_program *program, int argc, char **argv, qc_args *ret, qc_err *err) QC_WARN_UNUSED;
void qc_args_clear(qc_args *args);

/* Was the option given / its last value (NULL if it was not given) / how often it was given. */
bool qc_args_has(const qc_args *args, const char *name);
const char *qc_args_value(const qc_args *args, const char *name);
int qc_args_count(const qc_args *args, const char *name);

/* Value of an option as a whole number in min .. max; `deflt` if it was not given. QC_E_USAGE names the
 * option. */
int qc_args_int(const qc_args *args, const char *name, int64_t min, int64_t max, int64_t deflt, int64_t *ret,
                qc_err *err) QC_WARN_UNUSED;

/* QC_E_USAGE with "; see 'PROGRAM --help'" behind the text. */
int qc_args_fail(const qc_program *program, qc_err *err, const char *fmt, ...) QC_PRINTF(3, 4);

/* Text of --help (at most 80 columns) / the man page in roff, section 1. */
int qc_opt_help(const qc_program *program, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;
int qc_opt_man(const qc_program *program, const char *version, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

/* Options of this program and the common ones, one after the other: index 0 .. ; NULL behind the last. */
const qc_opt *qc_opt_at(const qc_program *program, int index);

/* What an option shows, after looking into the schema. NULL where there is none. */
const char *qc_opt_arg(const qc_opt *opt);
const char *qc_opt_unit(const qc_opt *opt);
const char *qc_opt_default(const qc_opt *opt);
const char *qc_opt_text(const qc_opt *opt);

/* Of n names by name_at(ctx, i) the one closest to `word` if it is close enough to be a slip of the pen, else
 * NULL. */
const char *qc_nearest(const char *word, const char *(*name_at)(const void *ctx, int i), const void *ctx,
                       int n);

#endif
