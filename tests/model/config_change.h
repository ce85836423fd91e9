/* One key of a tiny model's config.json changed: what comes out, or the message. */
#ifndef QC_TEST_CONFIG_CHANGE_H
#define QC_TEST_CONFIG_CHANGE_H

#include "mem_source.h"
#include "model.h"
#include "qc_log.h"
#include "qc_test.h"

typedef struct change {
    const char *model, *patch;
    int rc;               /* expected code */
    const char *expected; /* part of the message (failure) or of the notes (success); NULL = no demand */
} change;

static inline void check_change(const change *c)
{
    mem_source *m = mem_tiny(c->model);
    qc_model_config config = {0};
    qc_err err = {0};
    mem_patch(m, c->patch);
    int rc = qc_model_config_load(&m->base, &config, &err);
    ck_assert_msg(rc == c->rc, "%s %s: code %d, expected %d: %s", c->model, c->patch, rc, c->rc, err.msg);
    const char *text = rc < 0 ? err.msg : config.notes ? config.notes : "";
    ck_assert_msg(!c->expected || strstr(text, c->expected), "%s %s: \"%s\" lacks \"%s\"", c->model, c->patch,
                  text, c->expected);
    ck_assert(rc == QC_OK || config.family == NULL);
    qc_model_config_clear(&config);
    mem_close(m);
}

static inline void check_changes(const change *list, size_t n)
{
    qc_log_set_level(QC_LOG_QUIET);
    for (size_t i = 0; i < n; i++)
        check_change(&list[i]);
}

#define CHECK(...)                                                                                           \
    do {                                                                                                     \
        static const change list[] = {__VA_ARGS__};                                                          \
        check_changes(list, sizeof list / sizeof list[0]);                                                   \
    } while (0)

static inline qc_model_config load(const char *model, const char *patch)
{
    mem_source *m = mem_tiny(model);
    qc_model_config config;
    qc_err err = {0};
    qc_log_set_level(QC_LOG_QUIET);
    mem_patch(m, patch);
    ck_assert_msg(qc_model_config_load(&m->base, &config, &err) == QC_OK, "%s %s: %s", model, patch, err.msg);
    mem_close(m);
    return config;
}

#endif
