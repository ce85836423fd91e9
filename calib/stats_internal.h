/* Layout of a statistics file (docs/formats/statistics.md). */
#ifndef QC_STATS_INTERNAL_H
#define QC_STATS_INTERNAL_H

#include "qc_file.h"
#include "stats_file.h"

#define QC_STATS_MAGIC   "\x89QCS\r\n\x1a\n"
#define QC_STATS_VERSION 1

enum {
    QC_STATS_HEAD = 32,        /* bytes of the header */
    QC_STATS_RECORD_HEAD = 32, /* of the head of a record */
    QC_STATS_FIXED = 16,       /* of a payload before its maxima */
    QC_STATS_PART_HEAD = 16,   /* of a part before its sums */
    QC_STATS_MAX_PARTS = 64    /* two per level of a tree of 2^31 blocks */
};

typedef struct qc_stats_record {
    uint64_t offset, raw_bytes, zip_bytes; /* of the payload */
    uint32_t crc;
    int n_parts;
} qc_stats_record;

struct qc_stats_file {
    char *path;
    qc_mapped map;
    qc_stats_info info;
    qc_stats_record *records; /* [qc_stats_n_places] */
};

struct qc_stats_writer {
    qc_outfile *out;
    qc_stats_info info;
    int64_t next; /* record to be written */
};

/* Bytes of a part of width n. */
int64_t qc_stats_part_bytes(int64_t n);

/* Stages of a layer whose inputs come from all tokens; behind them come those of experts, if it has some. */
static inline int qc_stats_n_shared(const qc_stats_info *info, int64_t layer)
{
    return info->sparse[layer] ? QC_STAGE_GATE_UP : QC_N_DENSE_STAGES;
}

/* First block of the windows of a file. */
static inline int64_t qc_stats_first_block(const qc_stats_info *info)
{
    return info->first_window * info->length / QC_HESSIAN_BLOCK;
}

#endif
