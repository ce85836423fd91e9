#include "opt.h"

#include "qc_alloc.h"
#include "schema.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NO_COMMAND "PATH" /* stands for "without a subcommand" in qc_opt.command */

static const qc_opt common[] = {{"cpu-mask", 0, "Common", .arg = "NAMES", .deflt = "nothing hidden",
                                 .help = "hide processor features, comma separated: avx2, avx512, "
                                         "avx512vnni, avx512bf16, amx, neon, dotprod, or "
                                         "all for the scalar kernels"},
                                {"progress", 0, .help = "show progress although stderr is no terminal"},
                                {"no-progress", 0, .help = "never show progress"},
                                {"quiet", 'q', .help = "no warnings, no progress"},
                                {"verbose", 'v', .help = "say more; twice for details"},
                                {"version", 0, .help = "print version and commit"},
                                {"help", 'h', .help = "print this help"},
                                {"man", 0, .help = "print the manual page in roff", .hidden = true},
                                {0}};

const qc_opt *qc_opt_at(const qc_program *program, int index)
{
    int i = 0;
    while (program->opts[i].name && i < index)
        i++;
    if (program->opts[i].name)
        return &program->opts[i];
    index -= i;
    for (i = 0; common[i].name && i < index; i++)
        ;
    return common[i].name ? &common[i] : NULL;
}

/* ---- what an option shows ---- */

static const qc_key *key_of(const qc_opt *opt)
{
    return opt->key && *opt->key ? qc_schema_find(opt->key) : NULL;
}

const char *qc_opt_arg(const qc_opt *opt)
{
    const qc_key *key = key_of(opt);
    if (opt->arg || !key || opt->value)
        return opt->arg;
    switch (key->type) {
    case QC_KEY_INT:
        return "N";
    case QC_KEY_FLOAT:
        return "X";
    case QC_KEY_SIZE:
        return "SIZE";
    case QC_KEY_ENUM:
        return "WORD";
    case QC_KEY_PATH:
        return "PATH";
    default:
        return "TEXT";
    }
}

const char *qc_opt_unit(const qc_opt *opt)
{
    const qc_key *key = key_of(opt);
    return opt->unit || !key || opt->value ? opt->unit : key->unit;
}

const char *qc_opt_default(const qc_opt *opt)
{
    const qc_key *key = key_of(opt);
    if (!qc_opt_arg(opt))
        return NULL;
    const char *text = opt->deflt || !key ? opt->deflt : key->deflt;
    return text ? text : "none";
}

const char *qc_opt_text(const qc_opt *opt)
{
    const qc_key *key = key_of(opt);
    return opt->help || !key ? opt->help : key->help;
}

/* ---- slips of the pen ---- */

#define MAX_WORD 48

/* Levenshtein distance of two words of at most MAX_WORD bytes. */
static int edit_distance(const char *a, const char *b)
{
    int row[MAX_WORD + 1];
    int n = (int)strlen(b);
    for (int j = 0; j <= n; j++)
        row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[n];
}

const char *qc_nearest(const char *word, const char *(*name_at)(const void *ctx, int i), const void *ctx,
                       int n)
{
    const char *nearest = NULL;
    size_t n_word = strlen(word);
    int best = n_word <= 3 ? 2 : n_word <= 6 ? 3 : 4; /* first distance that is too far */
    for (int i = 0; i < n && n_word <= MAX_WORD; i++) {
        const char *name = name_at(ctx, i);
        if (strlen(name) > MAX_WORD)
            continue;
        int distance = edit_distance(word, name);
        if (distance < best) {
            best = distance;
            nearest = name;
        }
    }
    return nearest;
}

/* ---- parsing ---- */

int qc_args_fail(const qc_program *program, qc_err *err, const char *fmt, ...)
{
    char text[QC_ERR_MSG_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return qc_fail(err, QC_E_USAGE, "%s; see '%s --help'", text, program->name);
}

static const char *opt_name_at(const void *program, int i)
{
    return qc_opt_at(program, i)->name;
}

static const qc_opt *find_long(const qc_program *program, const char *name, size_t n_bytes)
{
    const qc_opt *opt;
    for (int i = 0; (opt = qc_opt_at(program, i)); i++)
        if (strlen(opt->name) == n_bytes && memcmp(opt->name, name, n_bytes) == 0)
            return opt;
    return NULL;
}

static const qc_opt *find_letter(const qc_program *program, char letter)
{
    const qc_opt *opt;
    for (int i = 0; (opt = qc_opt_at(program, i)); i++)
        if (opt->letter == letter)
            return opt;
    return NULL;
}

static int unknown_option(const qc_program *program, const char *name, size_t n_bytes, qc_err *err)
{
    char word[MAX_WORD + 2];
    int n_opts = 0;
    while (qc_opt_at(program, n_opts))
        n_opts++;
    snprintf(word, sizeof word, "%.*s", (int)(n_bytes <= MAX_WORD ? n_bytes : MAX_WORD + 1), name);
    const char *near = qc_nearest(word, opt_name_at, program, n_opts);
    return qc_args_fail(program, err, "unknown option '--%.*s'%s%s%s", (int)(n_bytes < 80 ? n_bytes : 80),
                        name, near ? " (did you mean '--" : "", near ? near : "", near ? "'?)" : "");
}

static void add_arg(qc_args *args, const qc_opt *opt, const char *value)
{
    args->list[args->n_list++] = (qc_arg){opt, value ? value : opt->value};
}

/* argv[*i] is "--...": consume it and its argument. */
static int parse_long(qc_args *args, int argc, char **argv, int *i, qc_err *err)
{
    const char *name = argv[*i] + 2, *value = NULL;
    size_t n = strcspn(name, "=");
    const qc_opt *opt = find_long(args->program, name, n);
    if (!opt)
        return unknown_option(args->program, name, n, err);
    if (!qc_opt_arg(opt)) {
        if (name[n])
            return qc_args_fail(args->program, err, "option '--%s' takes no argument", opt->name);
    } else if (name[n]) {
        value = name + n + 1;
    } else {
        if (*i + 1 >= argc)
            return qc_args_fail(args->program, err, "option '--%s' needs an argument %s", opt->name,
                                qc_opt_arg(opt));
        value = argv[++*i];
    }
    add_arg(args, opt, value);
    return QC_OK;
}

/* argv[*i] is "-abc": switches, the last of which may take the rest or the next word as its argument. */
static int parse_short(qc_args *args, int argc, char **argv, int *i, qc_err *err)
{
    for (const char *p = argv[*i] + 1; *p; p++) {
        const qc_opt *opt = find_letter(args->program, *p);
        if (!opt)
            return qc_args_fail(args->program, err, "unknown option '-%c'", *p);
        if (!qc_opt_arg(opt)) {
            add_arg(args, opt, NULL);
            continue;
        }
        if (!p[1] && *i + 1 >= argc)
            return qc_args_fail(args->program, err, "option '-%c' needs an argument %s", *p, qc_opt_arg(opt));
        add_arg(args, opt, p[1] ? p + 1 : argv[++*i]);
        break;
    }
    return QC_OK;
}

static const char *command_at(const void *program, int i)
{
    return ((const qc_program *)program)->commands[i].text;
}

/* One operand too many: perhaps the first was meant to be a command. */
static int surplus_operand(const qc_args *args, const char *text, qc_err *err)
{
    const qc_program *program = args->program;
    int n_commands = 0;
    while (program->commands && program->commands[n_commands].text)
        n_commands++;
    const char *near = args->command || !args->n_operands
                           ? NULL
                           : qc_nearest(args->operands[0], command_at, program, n_commands);
    if (near)
        return qc_args_fail(program, err, "unknown command '%.80s' (did you mean '%s'?)", args->operands[0],
                            near);
    return qc_args_fail(program, err, "unexpected argument '%.80s'", text);
}

static int parse_operand(qc_args *args, const char *text, qc_err *err)
{
    const qc_program *program = args->program;
    if (args->n_operands == 0 && !args->command)
        for (const qc_opt_note *c = program->commands; c && c->text; c++)
            if (strcmp(c->text, text) == 0) {
                args->command = c->text;
                return QC_OK;
            }
    if (args->n_operands == program->max_operands)
        return surplus_operand(args, text, err);
    args->operands[args->n_operands++] = text;
    return QC_OK;
}

static int parse_all(qc_args *args, int argc, char **argv, qc_err *err)
{
    bool options = true;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (options && strcmp(word, "--") == 0)
            options = false;
        else if (options && word[0] == '-' && word[1] == '-')
            QC_TRY(parse_long(args, argc, argv, &i, err));
        else if (options && word[0] == '-' && word[1])
            QC_TRY(parse_short(args, argc, argv, &i, err));
        else
            QC_TRY(parse_operand(args, word, err));
        if (qc_args_has(args, "help") || qc_args_has(args, "version") || qc_args_has(args, "man"))
            return QC_OK;
    }
    for (int i = 0; i < args->n_list; i++) {
        const qc_opt *opt = args->list[i].opt;
        size_t n;
        if (opt->command && qc_word_find(opt->command, args->command ? args->command : NO_COMMAND) < 0) {
            const char *command = qc_word_at(opt->command, 0, &n);
            return qc_args_fail(args->program, err, "option '--%s' belongs to '%s %.*s'", opt->name,
                                args->program->name, (int)n, command);
        }
    }
    for (int i = 0; i < args->n_list; i++)
        if (args->list[i].opt->later)
            return qc_fail(err, QC_E_UNSUPPORTED, "option '--%s' is not supported yet",
                           args->list[i].opt->name);
    return QC_OK;
}

int qc_args_parse(const qc_program *program, int argc, char **argv, qc_args *ret, qc_err *err)
{
    /* one word holds at most as many options as it has letters */
    size_t n_max = 1;
    for (int i = 1; i < argc; i++)
        n_max += strlen(argv[i]) + 1;
    qc_args args = {.program = program};
    args.list = qc_alloc(n_max, sizeof *args.list);
    args.operands = qc_alloc((size_t)argc + 1, sizeof *args.operands);
    int rc =
        args.list && args.operands ? QC_OK : qc_fail_nomem(err, "command line", n_max * sizeof *args.list);
    if (rc == QC_OK)
        rc = parse_all(&args, argc, argv, err);
    if (rc == QC_OK)
        *ret = args;
    else
        qc_args_clear(&args);
    return rc;
}

void qc_args_clear(qc_args *args)
{
    qc_free(args->list);
    qc_free(args->operands);
    memset(args, 0, sizeof *args);
}

int qc_args_count(const qc_args *args, const char *name)
{
    int n = 0;
    for (int i = 0; i < args->n_list; i++)
        n += strcmp(args->list[i].opt->name, name) == 0;
    return n;
}

bool qc_args_has(const qc_args *args, const char *name)
{
    return qc_args_count(args, name) > 0;
}

const char *qc_args_value(const qc_args *args, const char *name)
{
    for (int i = args->n_list; i-- > 0;)
        if (strcmp(args->list[i].opt->name, name) == 0)
            return args->list[i].value;
    return NULL;
}

int qc_args_int(const qc_args *args, const char *name, int64_t min, int64_t max, int64_t deflt, int64_t *ret,
                qc_err *err)
{
    const char *text = qc_args_value(args, name);
    int64_t value = deflt;
    qc_err why;
    if (text && qc_parse_int(text, &value, &why) < 0)
        return qc_args_fail(args->program, err, "--%s: %s", name, why.msg);
    if (text && (value < min || value > max))
        return qc_args_fail(args->program, err, "--%s: %s is out of range (%lld to %lld)", name, text,
                            (long long)min, (long long)max);
    *ret = value;
    return QC_OK;
}
