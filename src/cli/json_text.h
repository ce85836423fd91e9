/* JSON strings with everything they may hold, NUL included, which the document library can not represent. */
#ifndef QC_CLI_JSON_TEXT_H
#define QC_CLI_JSON_TEXT_H

#include "qc_buf.h"
#include "qc_err.h"

/* Append the UTF-8 text of one JSON string (blanks around it allowed, nothing else) to *ret. QC_E_INPUT: no
 * string, bad escape, raw control character, surrogate without its partner, invalid UTF-8. */
int qc_json_text_parse(const char *json, size_t n_bytes, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

/* Append UTF-8 text as a JSON string with quotes. */
int qc_json_text_print(const char *text, size_t n_bytes, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

#endif
