/* Numbers from text that people or files wrote. The whole text must be the number: no blanks around it, no junk behind
 * it, nothing cut or wrapped. */
#ifndef QC_PARSE_H
#define QC_PARSE_H

#include <stdbool.h>
#include <stdint.h>

/* Decimal integer with an optional sign, in min .. max. */
bool qc_parse_i64(const char *text, int64_t min, int64_t max, int64_t *ret);

/* Finite decimal number ("0.5", "-1e-3"); no hexadecimal, "nan" or "inf". */
bool qc_parse_double(const char *text, double *ret);

#endif
