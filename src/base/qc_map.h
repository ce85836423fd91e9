/* Hash map from byte strings to int64 values, for names and vocabularies. Keys are borrowed, not copied: they
 * must outlive the map. Iteration order is not offered, so results can not depend on it. */
#ifndef QC_MAP_H
#define QC_MAP_H

#include "qc_err.h"

#include <stddef.h>
#include <stdint.h>

typedef struct qc_map qc_map;

/* Room for about n_expected keys (grows by itself). NULL when out of memory. */
qc_map *qc_map_new(size_t n_expected);
void qc_map_free(qc_map *map);

/* Insert a key. Returns 1 if inserted, 0 if the key was there already (value unchanged), QC_E_RESOURCE. */
int qc_map_add(qc_map *map, const char *key, size_t key_bytes, int64_t value) QC_WARN_UNUSED;

/* Value of a key, or `absent`. */
int64_t qc_map_get(const qc_map *map, const char *key, size_t key_bytes, int64_t absent);

/* Number of keys. */
size_t qc_map_count(const qc_map *map);

#endif
