/* See metrics_merge.h. */
#include "client/ctl/watch/metrics_merge.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"

#define NAME_CHARS "abcdefghijklmnopqrstuvwxyz0123456789_"
#define UP         "shardd_up"
#define UP_HELP    "Whether the daemon answers."

void metrics_merge_deinit(struct metrics_merge *m)
{
    for (uint32_t i = 0; i < m->count; i++) {
        if (m->families[i].samples != NULL)
            fclose(m->families[i].samples);
        free(m->families[i].text);
        free(m->families[i].help);
    }
    m->count = 0;
}

static struct merge_family *find(struct metrics_merge *m, const char *name)
{
    for (uint32_t i = 0; i < m->count; i++)
        if (strcmp(m->families[i].name, name) == 0)
            return &m->families[i];
    return NULL;
}

/* -- Lines ------------------------------------------------------------------------------------ */

struct line {
    const char *text; /* ends with '\n' */
    size_t bytes;     /* without it */
};

/* The next line of the page; false: there is none. Printable ASCII only, and no line is cut. */
static bool next_line(const char **at, const char *end, struct line *ret_line)
{
    if (*at == end)
        return false;
    const char *newline = memchr(*at, '\n', (size_t)(end - *at));
    *ret_line = (struct line){ *at, newline != NULL ? (size_t)(newline - *at) : SIZE_MAX };
    *at = newline != NULL ? newline + 1 : end;
    return true;
}

static bool is_printable(const struct line *l)
{
    for (size_t i = 0; i < l->bytes; i++)
        if (l->text[i] < ' ' || l->text[i] > '~')
            return false;
    return true;
}

/* "# HELP shardd_x " and "# TYPE shardd_x ": the name, and where the rest begins. 0: it is none. */
static size_t take_comment(const struct line *l, const char *word, char name[MERGE_NAME_BYTES])
{
    const size_t head = strlen(word);
    if (l->bytes < head || strncmp(l->text, word, head) != 0)
        return 0;
    const size_t bytes = strspn(l->text + head, NAME_CHARS);
    if (bytes >= MERGE_NAME_BYTES || strncmp(l->text + head, "shardd_", 7) != 0 ||
        l->text[head + bytes] != ' ')
        return 0;
    snprintf(name, MERGE_NAME_BYTES, "%.*s", (int)bytes, l->text + head);
    return head + bytes + 1;
}

static bool is_one_of(const char *text, size_t bytes, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strlen(words[i]) == bytes && strncmp(words[i], text, bytes) == 0)
            return true;
    return false;
}

/* "shardd_x{device="cpu0",...} 1.5" of that family and that device. */
static bool is_sample(const struct line *l, const struct merge_family *f, const char *device)
{
    static const char *const endings[] = { "", "_bucket", "_sum", "_count" };
    const size_t name = strlen(f->name), all = strspn(l->text, NAME_CHARS);
    const bool histogram = strcmp(f->type, "histogram") == 0;
    char label[128];
    const int bytes = snprintf(label, sizeof label, "{device=\"%s\"", device);
    if (all < name || all >= l->bytes || strncmp(l->text, f->name, name) != 0 ||
        !is_one_of(l->text + name, all - name, endings, histogram ? ARRAY_SIZE(endings) : 1) ||
        l->bytes - all < (size_t)bytes + 3 || strncmp(l->text + all, label, (size_t)bytes) != 0 ||
        strchr(",}", l->text[all + (size_t)bytes]) == NULL)
        return false;
    size_t space = l->bytes;
    while (l->text[space - 1] != ' ' && space > all + (size_t)bytes)
        space--;
    char *end = NULL;
    (void)strtod(l->text + space, &end);
    return l->text[space - 1] == ' ' && l->text[space - 2] == '}' && space < l->bytes &&
           end == l->text + l->bytes;
}

/* -- A page ----------------------------------------------------------------------------------- */

/* What a page is read into: families of its own, so that a bad one leaves nothing. */
struct reading {
    struct metrics_merge *into;
    const char *device;
    struct merge_family *family; /* of the last HELP */
    uint32_t lines;
};

static int add_family(struct metrics_merge *m, const char *name, const char *help, size_t bytes,
                      struct shd_err *e)
{
    if (m->count == MERGE_FAMILIES_MAX)
        return err_set(e, SHD_EPROTO, "more than %u families", MERGE_FAMILIES_MAX);
    struct merge_family *f = &m->families[m->count];
    *f = (struct merge_family){ .help = sys_malloc(bytes + 1) };
    f->samples = f->help != NULL ? open_memstream(&f->text, &f->bytes) : NULL;
    if (f->samples == NULL) {
        free(f->help);
        return err_set(e, SHD_ENOMEM, "no memory for metrics");
    }
    memcpy(f->help, help, bytes);
    f->help[bytes] = '\0';
    snprintf(f->name, sizeof f->name, "%s", name);
    m->count++;
    return SHD_OK;
}

static int bad_line(const struct reading *r, struct shd_err *e)
{
    return err_set(e, SHD_EPROTO, "line %" PRIu32 " of its metrics is none of a daemon's",
                   r->lines);
}

static int take_help(struct reading *r, const struct line *l, struct shd_err *e)
{
    char name[MERGE_NAME_BYTES];
    const size_t at = take_comment(l, "# HELP ", name);
    if (at == 0 || find(r->into, name) != NULL)
        return bad_line(r, e);
    const int status = add_family(r->into, name, l->text + at, l->bytes - at, e);
    if (status == SHD_OK)
        r->family = &r->into->families[r->into->count - 1];
    return status;
}

static int take_type(struct reading *r, const struct line *l, struct shd_err *e)
{
    static const char *const types[] = { "counter", "gauge", "histogram" };
    char name[MERGE_NAME_BYTES];
    const size_t at = take_comment(l, "# TYPE ", name);
    if (at == 0 || r->family == NULL || strcmp(name, r->family->name) != 0 ||
        !is_one_of(l->text + at, l->bytes - at, types, ARRAY_SIZE(types)))
        return bad_line(r, e);
    snprintf(r->family->type, sizeof r->family->type, "%.*s", (int)(l->bytes - at), l->text + at);
    return SHD_OK;
}

static int take_line(struct reading *r, const struct line *l, struct shd_err *e)
{
    r->lines++;
    if (l->bytes == SIZE_MAX || !is_printable(l))
        return bad_line(r, e);
    if (strncmp(l->text, "# HELP ", 7) == 0)
        return take_help(r, l, e);
    if (l->text[0] == '#')
        return take_type(r, l, e);
    if (r->family == NULL || r->family->type[0] == '\0' || !is_sample(l, r->family, r->device))
        return bad_line(r, e);
    fwrite(l->text, 1, l->bytes + 1, r->family->samples);
    return SHD_OK;
}

/* The families of one page behind those of others. */
static int join(struct metrics_merge *m, struct metrics_merge *page, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < page->count; i++) {
        struct merge_family *f = &page->families[i];
        if (find(m, f->name) == NULL)
            r = add_family(m, f->name, f->help, strlen(f->help), e);
        struct merge_family *to = find(m, f->name);
        if (r != SHD_OK || fflush(f->samples) != 0)
            return r != SHD_OK ? r : err_set(e, SHD_ENOMEM, "no memory for metrics");
        CHECK(to != NULL);
        memcpy(to->type, f->type, sizeof to->type);
        fwrite(f->text, 1, f->bytes, to->samples);
    }
    return r;
}

int metrics_merge_add(struct metrics_merge *m, const char *device, const char *text, size_t bytes,
                      struct shd_err *e)
{
    struct metrics_merge *page = sys_calloc(1, sizeof *page);
    if (page == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for metrics");
    struct reading reading = { .into = page, .device = device };
    const char *at = text;
    struct line line;
    int r = SHD_OK;
    while (r == SHD_OK && next_line(&at, text + bytes, &line))
        r = take_line(&reading, &line, e);
    if (r == SHD_OK && find(page, UP) == NULL)
        r = err_set(e, SHD_EPROTO, "its metrics have no " UP);
    if (r == SHD_OK)
        r = join(m, page, e);
    metrics_merge_deinit(page);
    free(page);
    return r;
}

int metrics_merge_add_down(struct metrics_merge *m, const char *device, struct shd_err *e)
{
    int r = SHD_OK;
    if (find(m, UP) == NULL)
        r = add_family(m, UP, UP_HELP, strlen(UP_HELP), e);
    if (r != SHD_OK)
        return r;
    struct merge_family *f = find(m, UP);
    CHECK(f != NULL);
    snprintf(f->type, sizeof f->type, "gauge");
    fprintf(f->samples, UP "{device=\"%s\"} 0\n", device);
    return SHD_OK;
}

int metrics_merge_text(struct metrics_merge *m, char **ret_text, size_t *ret_bytes,
                       struct shd_err *e)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    bool good = out != NULL;
    for (uint32_t i = 0; good && i < m->count; i++) {
        struct merge_family *f = &m->families[i];
        good = ferror(f->samples) == 0 && fflush(f->samples) == 0;
        fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", f->name, f->help, f->name, f->type);
        fwrite(f->text, 1, good ? f->bytes : 0, out);
    }
    good = good && ferror(out) == 0;
    if (out != NULL && fclose(out) != 0)
        good = false;
    if (!good) {
        free(text);
        return err_set(e, SHD_ENOMEM, "no memory for metrics");
    }
    *ret_text = text;
    *ret_bytes = bytes;
    return SHD_OK;
}
