/* See say.h. */
#include "client/ctl/base/say.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"

#define LINE_BYTES 2048u

static char current[PATH_MAX]; /* "": stderr is no log */
static char old[PATH_MAX];
static uint64_t lost;  /* lines since the log took one */
static int lost_errno; /* why the first of them is lost */

/* A new file at current, as stderr. */
static int start(struct shd_err *e)
{
    const int fd = open(current, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW,
                        0600);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "open '%s'", current);
    const int r = dup2(fd, STDERR_FILENO) < 0 ? err_sys(e, SHD_EIO, "write to '%s'", current)
                                              : SHD_OK;
    close(fd);
    return r;
}

int say_to_log(const char *path, struct shd_err *e)
{
    CHECK(current[0] == '\0');
    if (snprintf(old, sizeof(old), "%s" SAY_LOG_OLD, path) >= (int)sizeof(old))
        return err_set(e, SHD_ERANGE, "the log's path '%.60s...' is too long", path);
    snprintf(current, sizeof(current), "%s", path);
    const int r = start(e);
    if (r != SHD_OK)
        current[0] = '\0';
    return r;
}

/* Make room for so many bytes. Where no new log can be made the old one goes on. */
static void turn_over(size_t bytes)
{
    struct stat st;
    struct shd_err ignored;
    if (current[0] == '\0' || fstat(STDERR_FILENO, &st) < 0 ||
        (uint64_t)st.st_size + bytes <= SAY_LOG_BYTES_MAX)
        return;
    if (rename(current, old) == 0 && start(&ignored) != SHD_OK)
        rename(old, current);
}

/* False: the log has not taken the line, and has no part of it. */
static bool put(const char *line, size_t bytes)
{
    struct stat before = { 0 };
    size_t done = 0;
    turn_over(bytes);
    const bool is_log = current[0] != '\0' && fstat(STDERR_FILENO, &before) == 0;
    while (done < bytes) {
        const ssize_t n = write(STDERR_FILENO, line + done, bytes - done);
        if (n < 0 && errno != EINTR)
            break;
        done += n > 0 ? (size_t)n : 0;
    }
    if (!is_log || done == bytes)
        return true; /* where nobody reads our stderr there is nowhere left to complain */
    if (lost == 0)
        lost_errno = errno;
    if (done > 0 && ftruncate(STDERR_FILENO, before.st_size) < 0)
        lost_errno = errno; /* half a line stays there */
    return false;
}

/* -- Lines --------------------------------------------------------------------------------------
 */

int say_options(const char *level, const char *format, struct shd_err *e)
{
    static const char *const levels[] = { "error", "warn", "info", "debug" };
    bool known = level == NULL;
    for (size_t i = 0; i < ARRAY_SIZE(levels) && !known; i++)
        known = strcmp(level, levels[i]) == 0;
    if (!known)
        return err_set(e, SHD_EINVAL, "--log-level '%.40s' is none of error, warn, info, debug",
                       level);
    if (format != NULL && strcmp(format, "text") != 0 && strcmp(format, "json") != 0)
        return err_set(e, SHD_EINVAL, "--log-format '%.40s' is neither text nor json", format);
    if (level != NULL)
        setenv(SAY_LEVEL_ENV, level, 1);
    if (format != NULL)
        setenv(SAY_FORMAT_ENV, format, 1);
    return SHD_OK;
}

bool say_as_json(void)
{
    const char *format = getenv(SAY_FORMAT_ENV);
    return format != NULL && strcmp(format, "json") == 0;
}

/* Paths, names and others' last words are in it: no escape sequence. */
static void clean(char *text, bool ascii)
{
    for (; *text != '\0'; text++) {
        const unsigned char c = (unsigned char)*text;
        if ((c < ' ' && c != '\n') || c == 0x7f || (c > 0x7f && ascii))
            *text = '?';
    }
}

/* Fill line with text in the form that is due; returns how many bytes. */
static size_t make_line(char *text, char line[LINE_BYTES])
{
    char now[CLOCK_TEXT_BYTES];
    const bool is_log = current[0] != '\0';
    char *json = NULL;
    int n;
    if (say_as_json()) {
        json_t *known = json_string(text);
        if (known == NULL) /* it is no UTF-8 */
            clean(text, /* ascii= */ true);
        json_decref(known);
        json_t *o = json_pack("{s:s, s:s, s:s, s:s}", "time", clock_text(now), "device", "shardctl",
                              "level", "info", "text", text);
        json = o != NULL ? json_dumps(o, JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
        json_decref(o);
    }
    if (json != NULL)
        n = snprintf(line, LINE_BYTES, "%s", json);
    else
        n = snprintf(line, LINE_BYTES, "%s%sshardctl: %s", is_log ? clock_text(now) : "",
                     is_log ? " " : "", text);
    free(json);
    const size_t used = n < 0 ? 0 : n < (int)LINE_BYTES - 1 ? (size_t)n : LINE_BYTES - 2;
    line[used] = '\n';
    return used + 1;
}

void say_line(const char *line, size_t bytes)
{
    char text[160], note[LINE_BYTES];
    if (lost > 0) {
        snprintf(text, sizeof(text), "%" PRIu64 " %s missing here: %s", lost,
                 lost == 1 ? "line is" : "lines are", strerror(lost_errno));
        if (put(note, make_line(text, note)))
            lost = 0;
    }
    lost += lost > 0 || !put(line, bytes);
}

void ctl_say(const char *fmt, ...)
{
    char text[1000], line[LINE_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    clean(text, /* ascii= */ false);
    say_line(line, make_line(text, line));
}
