/* Schema of the recipe: one table of keys with type, range, default, unit, help and place in struct
 * qc_recipe. The YAML reader, --set, the flags of the programs, the JSON in reports and docs/recipe.md are
 * all made from it. */
#ifndef QC_CLI_SCHEMA_H
#define QC_CLI_SCHEMA_H

#include "qc_buf.h"
#include "qc_err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    QC_KEY_STRING, /* char * */
    QC_KEY_PATH,   /* char *; a relative one is taken from the recipe's folder */
    QC_KEY_BOOL,   /* bool, or an int where -1 means unset */
    QC_KEY_INT,    /* int or int64_t */
    QC_KEY_FLOAT,  /* double */
    QC_KEY_SIZE,   /* uint64_t, bytes: 420MB, 2GiB, 1.5 GB, plain number */
    QC_KEY_ENUM,   /* int: place of the word in `words` */
    QC_KEY_MAP,    /* struct described by `sub` */
    QC_KEY_LIST,   /* array of structs described by `sub`, or of char * without it */
    QC_KEY_LIMITS  /* array of qc_limit: a mapping from names (those in `words`) to numbers */
} qc_key_type;

typedef struct qc_key qc_key;
struct qc_key {
    const char *name; /* NULL ends a table */
    qc_key_type type;
    size_t offset;      /* of the field in the struct of this table */
    size_t field_bytes; /* size of the field */
    size_t aux_offset; /* LIST, LIMITS: int count; MAP with `optional`: bool that says whether it was given */
    const qc_key *sub;
    size_t elem_bytes; /* LIST: of one element */
    double min, max;   /* INT, FLOAT: inclusive */
    int multiple;      /* INT: of what it must be a multiple; 0 = anything */
    const char
        *words; /* ENUM, LIMITS: a|b|c. Others: the one word that is accepted besides, worth word_value */
    int64_t word_value;
    const char *now;   /* ENUM: words that work today, a|b; NULL = all. One that is known but not in the list
                          is refused with QC_E_UNSUPPORTED */
    const char *unit;  /* of the number, NULL = none */
    const char *deflt; /* default as text, NULL = unset */
    const char *help;
    bool required; /* in an element of a list */
    bool selector; /* required, and without another key beside it a slip of the pen */
    bool optional; /* MAP: absent is different from all defaults */
    bool artifact; /* decides bytes of the artifacts; on a MAP or LIST it holds for everything below */
};

/* Keys of the recipe's top level. */
extern const qc_key qc_schema[];

/* Key by its path ("quantize.weights.bits", "emit.0.path" or "emit.path"); NULL if there is none. */
const qc_key *qc_schema_find(const char *path);

/* Read a scalar into its field (strings: owned). Paths are put behind `folder` unless it is NULL. On failure
 * the message says what is wrong with the value and nothing else: the caller puts place and key in front. */
int qc_key_store(const qc_key *key, const char *text, const char *folder, void *field,
                 qc_err *err) QC_WARN_UNUSED;

/* "420MB", "2GiB", "1.5GB", "4096": kB, MB, GB, TB are powers of 1000, KiB, MiB, GiB, TiB of 1024, B or no
 * unit is bytes; a blank may stand before the unit. */
int qc_parse_size(const char *text, uint64_t *ret_bytes, qc_err *err) QC_WARN_UNUSED;
int qc_parse_int(const char *text, int64_t *ret, qc_err *err) QC_WARN_UNUSED;
int qc_parse_float(const char *text, double *ret, qc_err *err) QC_WARN_UNUSED;

/* Word number i of "a|b|c" and its length; NULL behind the last. */
const char *qc_word_at(const char *words, int i, size_t *ret_bytes);
/* Place of a word in "a|b|c", -1 if it is not there. */
int qc_word_find(const char *words, const char *text);

/* "whole number 2 to 8, or 16": the type as documents and messages say it. */
int qc_key_describe(const qc_key *key, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

#endif
