/* State of a running job, shared by job.c (does the work) and job_report.c (tells about it). */
#ifndef QC_CLI_JOB_STATE_H
#define QC_CLI_JOB_STATE_H

#include "assign.h"
#include "backend.h"
#include "convert.h"
#include "corpus.h"
#include "eval.h"
#include "given_stats.h"
#include "job.h"
#include "journal.h"
#include "model.h"
#include "qc_result.h"
#include "reference.h"
#include "writer.h"

typedef struct output {
    const qc_recipe_emit *emit;
    const qc_recipe_quantize *asked;    /* the recipe's or the entry's own */
    const qc_recipe_quantize *quantize; /* what is done: the same, or with the choice of a bit budget */
    qc_recipe_quantize chosen;          /* of a lead with a budget; owns its overrides, borrows the rest */
    qc_assignment assignment;           /* of a lead with a budget */
    uint64_t budget_bytes;              /* of the file, expected; of a lead with a budget */
    int64_t measured_tokens, statistics_tokens; /* that the choice rests on; of a lead with a budget */
    qc_event_list *events;                      /* the job's, or where those of an earlier output repeat */
    int lead; /* first output with these grids, which has the calibrated run of all of them */
    bool calibrated;
    char *journal_path;     /* of a lead with calibration, else NULL */
    qc_journal *journal;    /* the same, once it is open */
    uint64_t journal_bytes; /* planned */
    qc_convert_plan plan;
    qc_account_list accounts;
    const qc_writer_format *format;
    qc_dtype scale; /* type of scales where the recipe says auto */
    bool carries;   /* the source is quantized and nothing else was asked for: its codes are carried over */
    qc_writer *writer;       /* NULL once published */
    char *final_path;        /* as the artifact is called now; NULL before publishing */
    uint64_t planned_bytes;  /* of the artifact without manifest, all folded that may be */
    uint64_t n_bytes;        /* of the file, or of all files of the folder */
    char sha256[65];         /* of the file */
    qc_artifact_file *files; /* [n_files] of the folder, owned */
    int n_files;
    bool rejected;
    qc_evaluation evaluation;
    qc_gate *gates;
    int n_gates;
} output;

/* Wall seconds of the phases of all outputs. */
typedef struct job_times {
    double open, hash, budget, calibrate, convert, verify, total;
} job_times;

typedef struct job {
    const qc_recipe *recipe;
    const qc_job_options *options;
    qc_pool *pool;
    qc_backend *be;
    qc_source *src;
    qc_model model;
    bool model_open;
    char *text; /* what is scored; NULL without verification */
    qc_windows windows;
    qc_reference *stored;  /* in place of running the model; NULL: it is run */
    qc_corpus corpus;      /* empty without calibration, or with statistics */
    qc_given_stats *given; /* statistics in place of a text; NULL without */
    uint64_t corpus_plan_bytes, budget_plan_bytes;
    qc_calibration calibration; /* what the report says of it */
    output *outputs;
    int n_outputs;
    qc_event_list events;
    qc_event_list
        repeated_events;       /* of outputs with the grids of an earlier one: each fallback counts once */
    char (*source_sha256)[65]; /* [src->n_files]; NULL before hashing */
    uint64_t peak_plan_bytes;  /* memory that the plan expects */
    uint64_t disk_plan_bytes;  /* of artifacts and scratch file together */
    uint64_t scratch_plan_bytes;
    double start; /* monotonic seconds */
    job_times times;
} job;

#endif
