/* JSON through cJSON, with what cJSON lacks: error lines with file and position, depth and size limits,
 * duplicate keys refused, exact typed getters. The cJSON tree is the document type everywhere. */
#ifndef QC_JSON_H
#define QC_JSON_H

#include "qc_err.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Parse n_bytes of UTF-8 JSON (one value, blanks around it, nothing after it). `name` is for messages.
 * Refused with QC_E_INPUT: syntax errors (line:column given), NUL (also as an escape: our strings end there),
 * control characters in strings, invalid UTF-8, nesting over 200, and with unique_keys a key that occurs
 * twice in one object after unescaping. Free with cJSON_Delete. */
int qc_json_parse(const char *text, size_t n_bytes, const char *name, bool unique_keys, cJSON **ret_doc,
                  qc_err *err) QC_WARN_UNUSED;

/* Make numbers that were written with a point or an exponent print as they were (3.0 as 3.0, for readers that
 * tell floats from integers). doc is what qc_json_parse made of text, unchanged since. QC_E_RESOURCE. */
int qc_json_keep_floats(cJSON *doc, const char *text, size_t n_bytes, qc_err *err) QC_WARN_UNUSED;

/* Read and parse a file of at most max_bytes. */
int qc_json_load(const char *path, size_t max_bytes, bool unique_keys, cJSON **ret_doc,
                 qc_err *err) QC_WARN_UNUSED;

/* Member of an object (exact case), NULL if absent or null: the two mean the same in every file we read. */
const cJSON *qc_json_get(const cJSON *object, const char *key);

/* Integer value of a number item; false if it is no number, has a fraction or is not exact (|x| >= 2^53). */
bool qc_json_int(const cJSON *item, int64_t *ret);

/* Building a document with cJSON's Add functions hides failed allocations: a key is just missing. Call
 * qc_json_watch before, and qc_json_watched on the result: NULL (document freed) if an allocation of this
 * thread failed in between. */
void qc_json_watch(void);
/* Append an item (taken over, freed if it can not be attached) to an array and return it; NULL is passed on.
 */
cJSON *qc_json_add_item(cJSON *list, cJSON *item);
/* A member of an object; null where the number is not finite, the text NULL or empty. */
void qc_json_add_number(cJSON *object, const char *key, double x);
void qc_json_add_text(cJSON *object, const char *key, const char *text);
cJSON *qc_json_watched(cJSON *doc);

/* Two-space-indented text with a final newline (numbers with 17 digits where needed, NaN and infinities as
 * null, bytes that are no UTF-8 as U+FFFD); NULL when out of memory. Free with qc_free. */
char *qc_json_print(const cJSON *doc);

/* True if n_bytes are well-formed UTF-8 (no surrogates, no overlong forms); else *ret_bad is the offset of
 * the first bad byte. ret_bad may be NULL. */
bool qc_utf8_valid(const char *text, size_t n_bytes, size_t *ret_bad);

/* Bytes of the character that a NUL-terminated text starts with; 0 if it starts with none (end, or no UTF-8).
 */
size_t qc_utf8_char_bytes(const char *s);

#endif
