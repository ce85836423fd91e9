/* Parts of the corpus reader: the files of each kind become one stream of ids. */
#ifndef QC_CORPUS_INTERNAL_H
#define QC_CORPUS_INTERNAL_H

#include "corpus.h"

#include <stddef.h>

/* Ids of all documents, one behind the other. */
typedef struct qc_id_stream {
    int32_t *ids; /* owned by whoever made the stream */
    size_t n_ids, cap_ids;
    int64_t n_documents;
    int64_t row_length; /* > 0: rows of this length that are windows already */
} qc_id_stream;

/* Append what a file holds. Ids are checked by the caller. */
int qc_corpus_read_npy(qc_id_stream *st, const char *path, const qc_corpus_options *options,
                       qc_err *err) QC_WARN_UNUSED;
/* Text or .jsonl, with the tokenizer of the model. */
int qc_corpus_read_text(qc_id_stream *st, const qc_source *src, const char *path,
                        const qc_corpus_options *options, qc_event_list *events, qc_err *err) QC_WARN_UNUSED;

#endif
