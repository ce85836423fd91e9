/* Help text and manual page of a program, both from its option table. */
#include "opt.h"
#include "schema.h"

#include <stdio.h>
#include <string.h>

#define WIDTH       80
#define HELP_COLUMN 28

/* Exit codes in order; only programs that judge have gates, only one that takes recipes counts fallbacks. */
static const struct {
    qc_opt_note note;
    enum { EVERY, JUDGES, OTHERS, JOBS } of;
} exit_codes[] = {
    {{"0", "done, all gates passed"}, JUDGES},
    {{"0", "done"}, OTHERS},
    {{"1", "done, but a gate failed, or what was compared differs"}, JUDGES},
    {{"2", "usage error, or an output exists already"}, EVERY},
    {{"3", "bad input: a file or value is broken"}, EVERY},
    {{"4", "not supported: model family, field, device, format, or a known key not built yet"}, EVERY},
    {{"5", "out of memory or disk, over a cap, or an output could not be written"}, EVERY},
    {{"6",
      "done, gates passed, but more fallbacks than the recipe's allow permits (none if it says nothing)"},
     JOBS},
    {{"128+n", "ended by signal n"}, EVERY}};
#define N_EXIT_CODES (sizeof exit_codes / sizeof exit_codes[0])

/* Row i if it is the program's, else NULL. */
static const qc_opt_note *exit_code(const qc_program *program, size_t i)
{
    bool has = exit_codes[i].of == JUDGES   ? program->judges
               : exit_codes[i].of == OTHERS ? !program->judges
               : exit_codes[i].of == JOBS   ? program->takes_recipe
                                            : true;
    return has ? &exit_codes[i].note : NULL;
}

/* Words of `text` filled to the right margin, lines after the first indented; *column is where the cursor
 * stands. */
static int fill(qc_buf *out, const char *text, int indent, int *column, qc_err *err)
{
    while (*text) {
        if (text[0] == '\n' && text[1] == '\n') {
            QC_TRY(qc_buf_printf(out, err, "\n\n%*s", indent, ""));
            *column = indent;
        }
        text += strspn(text, " \n");
        int n = (int)strcspn(text, " \n");
        bool first = *column <= indent;
        if (!first && *column + 1 + n > WIDTH) {
            QC_TRY(qc_buf_printf(out, err, "\n%*s", indent, ""));
            *column = indent;
            first = true;
        }
        QC_TRY(qc_buf_printf(out, err, "%s%.*s", first ? "" : " ", n, text));
        *column += n + !first;
        text += n;
    }
    return QC_OK;
}

/* Words of a list that work today, where some do not. */
static int describe_supported(const qc_key *key, qc_buf *ret, qc_err *err)
{
    size_t n;
    const char *word;
    for (int i = 0; (word = qc_word_at(key->now, i, &n)); i++)
        QC_TRY(qc_buf_printf(ret, err, "%s%.*s", i ? ", " : " (supported now: ", (int)n, word));
    return qc_buf_printf(ret, err, ")");
}

/* Sentence about an option: help, words it takes, unit, default. */
static int describe(const qc_opt *opt, qc_buf *ret, qc_err *err)
{
    const qc_key *key = opt->key && *opt->key ? qc_schema_find(opt->key) : NULL;
    const char *unit = qc_opt_unit(opt), *word;
    size_t n_word;
    QC_TRY(qc_buf_printf(ret, err, "%s", qc_opt_text(opt)));
    if (key && !opt->value &&
        (key->type == QC_KEY_ENUM || key->type == QC_KEY_INT || key->type == QC_KEY_FLOAT)) {
        QC_TRY(qc_buf_printf(ret, err, "; "));
        QC_TRY(qc_key_describe(key, ret, err));
    }
    for (int i = 0; key && key->type == QC_KEY_LIMITS && (word = qc_word_at(key->words, i, &n_word)); i++)
        QC_TRY(qc_buf_printf(ret, err, "%s%.*s", i ? ", " : "; NAME is one of ", (int)n_word, word));
    if (opt->later)
        QC_TRY(qc_buf_printf(ret, err, " (not supported yet)"));
    else if (key && key->now)
        QC_TRY(describe_supported(key, ret, err));
    if (qc_opt_arg(opt))
        QC_TRY(qc_buf_printf(ret, err, " [%s%s%sdefault: %s]", unit ? "unit: " : "", unit ? unit : "",
                             unit ? ", " : "", qc_opt_default(opt)));
    return QC_OK;
}

/* A term in the left column and its text in the right one. */
static int help_pair(qc_buf *out, const char *term, const char *text, qc_err *err)
{
    int column = (int)strlen(term) + 2;
    QC_TRY(qc_buf_printf(out, err, "  %s", term));
    if (column + 2 > HELP_COLUMN)
        QC_TRY(qc_buf_printf(out, err, "\n%*s", HELP_COLUMN, ""));
    else
        QC_TRY(qc_buf_printf(out, err, "%*s", HELP_COLUMN - column, ""));
    column = HELP_COLUMN;
    QC_TRY(fill(out, text, HELP_COLUMN, &column, err));
    return qc_buf_printf(out, err, "\n");
}

static int help_options(const qc_program *program, qc_buf *out, qc_err *err)
{
    const qc_opt *opt;
    for (int i = 0; (opt = qc_opt_at(program, i)); i++) {
        char letter[5] = "    ", term[160];
        const char *arg = qc_opt_arg(opt);
        qc_buf text = {0};
        if (opt->hidden)
            continue;
        if (opt->group)
            QC_TRY(qc_buf_printf(out, err, "\n%s options:\n", opt->group));
        if (opt->letter)
            snprintf(letter, sizeof letter, "-%c, ", opt->letter);
        snprintf(term, sizeof term, "%s--%s%s%s", letter, opt->name, arg ? " " : "", arg ? arg : "");
        int rc = describe(opt, &text, err);
        if (rc == QC_OK)
            rc = help_pair(out, term, text.data, err);
        qc_buf_clear(&text);
        QC_TRY(rc);
    }
    return QC_OK;
}

int qc_opt_help(const qc_program *program, qc_buf *ret, qc_err *err)
{
    int column = 0;
    for (int i = 0; program->synopsis[i]; i++)
        QC_TRY(qc_buf_printf(ret, err, "%s %s %s\n", i ? "      " : "Usage:", program->name,
                             program->synopsis[i]));
    QC_TRY(qc_buf_printf(ret, err, "\n"));
    QC_TRY(fill(ret, program->description, 0, &column, err));
    QC_TRY(qc_buf_printf(ret, err, "\n"));
    if (program->commands)
        QC_TRY(qc_buf_printf(ret, err, "\nCommands:\n"));
    for (const qc_opt_note *c = program->commands; c && c->text; c++)
        QC_TRY(help_pair(ret, c->text, c->help, err));
    QC_TRY(help_options(program, ret, err));
    QC_TRY(qc_buf_printf(ret, err, "\nExamples:\n"));
    for (const qc_opt_note *e = program->examples; e->text; e++) {
        column = 6;
        QC_TRY(qc_buf_printf(ret, err, "  %s\n      ", e->text));
        QC_TRY(fill(ret, e->help, 6, &column, err));
        QC_TRY(qc_buf_printf(ret, err, "\n"));
    }
    QC_TRY(qc_buf_printf(ret, err, "\nExit codes:\n"));
    for (size_t i = 0; i < N_EXIT_CODES; i++)
        if (exit_code(program, i))
            QC_TRY(help_pair(ret, exit_code(program, i)->text, exit_code(program, i)->help, err));
    return QC_OK;
}

/* ---- roff ---- */

/* Text with what roff would interpret escaped: backslashes, hyphens that must stay hyphens, dots and quotes
 * at the start of a line. */
static int roff(qc_buf *out, const char *text, qc_err *err)
{
    if (*text == '.' || *text == '\'')
        QC_TRY(qc_buf_append(out, "\\&", 2, err));
    for (; *text; text++) {
        if (text[0] == '\n' && text[1] == '\n') {
            QC_TRY(qc_buf_printf(out, err, "\n.PP\n"));
            text++;
        } else if (*text == '\\')
            QC_TRY(qc_buf_printf(out, err, "\\e"));
        else if (*text == '-')
            QC_TRY(qc_buf_printf(out, err, "\\-"));
        else
            QC_TRY(qc_buf_append(out, text, 1, err));
    }
    return QC_OK;
}

/* .TP entry: bold term (with an argument in italics) and its text. */
static int man_pair(qc_buf *out, const char *term, const char *arg, const char *text, qc_err *err)
{
    QC_TRY(qc_buf_printf(out, err, ".TP\n\\fB"));
    QC_TRY(roff(out, term, err));
    QC_TRY(qc_buf_printf(out, err, "\\fR%s%s%s\n", arg ? " \\fI" : "", arg ? arg : "", arg ? "\\fR" : ""));
    QC_TRY(roff(out, text, err));
    return qc_buf_printf(out, err, "\n");
}

static int man_options(const qc_program *program, qc_buf *out, qc_err *err)
{
    const qc_opt *opt;
    for (int i = 0; (opt = qc_opt_at(program, i)); i++) {
        char term[160];
        qc_buf text = {0};
        if (opt->hidden)
            continue;
        if (opt->group)
            QC_TRY(qc_buf_printf(out, err, ".SS %s options\n", opt->group));
        if (opt->letter)
            snprintf(term, sizeof term, "-%c, --%s", opt->letter, opt->name);
        else
            snprintf(term, sizeof term, "--%s", opt->name);
        int rc = describe(opt, &text, err);
        if (rc == QC_OK)
            rc = man_pair(out, term, qc_opt_arg(opt), text.data, err);
        qc_buf_clear(&text);
        QC_TRY(rc);
    }
    return QC_OK;
}

int qc_opt_man(const qc_program *program, const char *version, qc_buf *ret, qc_err *err)
{
    QC_TRY(qc_buf_printf(ret, err, ".TH %s 1 \"\" \"qconvert %s\" \"User Commands\"\n.SH NAME\n%s \\- ",
                         program->name, version, program->name));
    QC_TRY(roff(ret, program->summary, err));
    QC_TRY(qc_buf_printf(ret, err, "\n.SH SYNOPSIS\n"));
    for (int i = 0; program->synopsis[i]; i++) {
        QC_TRY(qc_buf_printf(ret, err, "%s\\fB%s\\fR ", i ? ".br\n" : "", program->name));
        QC_TRY(roff(ret, program->synopsis[i], err));
        QC_TRY(qc_buf_printf(ret, err, "\n"));
    }
    QC_TRY(qc_buf_printf(ret, err, ".SH DESCRIPTION\n"));
    QC_TRY(roff(ret, program->description, err));
    QC_TRY(qc_buf_printf(ret, err, "\n"));
    if (program->commands)
        QC_TRY(qc_buf_printf(ret, err, ".SH COMMANDS\n"));
    for (const qc_opt_note *c = program->commands; c && c->text; c++)
        QC_TRY(man_pair(ret, c->text, NULL, c->help, err));
    QC_TRY(qc_buf_printf(ret, err, ".SH OPTIONS\n"));
    QC_TRY(man_options(program, ret, err));
    QC_TRY(qc_buf_printf(ret, err, ".SH EXAMPLES\n"));
    for (const qc_opt_note *e = program->examples; e->text; e++)
        QC_TRY(man_pair(ret, e->text, NULL, e->help, err));
    QC_TRY(qc_buf_printf(ret, err, ".SH EXIT STATUS\n"));
    for (size_t i = 0; i < N_EXIT_CODES; i++)
        if (exit_code(program, i))
            QC_TRY(man_pair(ret, exit_code(program, i)->text, NULL, exit_code(program, i)->help, err));
    return QC_OK;
}
