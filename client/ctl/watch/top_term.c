/* See top_term.h. */
#include "client/ctl/watch/top_term.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <curses.h>
#include <term.h>

#include "proto/base/check.h"

#define RESTORE_BYTES 256u

static struct {
    bool open, full;
    SCREEN *screen;
    struct termios before;
    char restore[RESTORE_BYTES]; /* what a fatal signal's handler writes */
    size_t restore_bytes;
} term;

static volatile sig_atomic_t ended_by;

/* -- Ways out -------------------------------------------------------------------------------- */

static void on_end(int signum)
{
    ended_by = signum;
}

/* No function of ncurses may be called here: what it would write was kept. */
static void on_fatal(int signum)
{
    if (term.full && write(STDOUT_FILENO, term.restore, term.restore_bytes) >= 0)
        tcsetattr(STDIN_FILENO, TCSANOW, &term.before);
    raise(signum); /* its handler is reset: SA_RESETHAND */
}

static void catch_signals(void)
{
    static const int ends[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT };
    static const int fatals[] = { SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL };
    struct sigaction end = { .sa_handler = on_end };
    struct sigaction fatal = { .sa_handler = on_fatal, .sa_flags = (int)SA_RESETHAND };
    for (size_t i = 0; i < ARRAY_SIZE(ends); i++)
        sigaction(ends[i], &end, NULL);
    for (size_t i = 0; i < ARRAY_SIZE(fatals); i++)
        sigaction(fatals[i], &fatal, NULL);
    signal(SIGPIPE, SIG_IGN);
}

int term_signal(void)
{
    return ended_by;
}

static void keep(const char *sequence)
{
    const size_t bytes = sequence != NULL ? strlen(sequence) : 0;
    if (term.restore_bytes + bytes > RESTORE_BYTES)
        return;
    memcpy(term.restore + term.restore_bytes, sequence != NULL ? sequence : "", bytes);
    term.restore_bytes += bytes;
}

static const char *capability(const char *name)
{
    char writable[16];
    snprintf(writable, sizeof(writable), "%s", name); /* tigetstr() takes no const */
    const char *s = tigetstr(writable);
    return s == (const char *)-1 ? NULL : s;
}

/* -- Open and close -------------------------------------------------------------------------- */

static void init_looks(void)
{
    const char *no_color = getenv("NO_COLOR");
    if ((no_color != NULL && no_color[0] != '\0') || !has_colors() || start_color() == ERR)
        return;
    use_default_colors();
    init_pair(LOOK_GOOD, COLOR_GREEN, -1);
    init_pair(LOOK_WARN, COLOR_YELLOW, -1);
    init_pair(LOOK_BAD, COLOR_RED, -1);
}

static int open_full(void)
{
    term.screen = newterm(NULL, stdout, stdin);
    if (term.screen == NULL)
        return 0;
    term.full = true;
    keep(capability("sgr0"));
    keep(capability("cnorm"));
    keep(capability("rmcup"));
    keep(capability("rmkx"));
    set_term(term.screen);
    cbreak();
    noecho();
    keypad(stdscr, TRUE);
    nodelay(stdscr, TRUE);
    curs_set(0);
    set_escdelay(25);
    init_looks();
    return 1;
}

int term_open(struct shd_err *e)
{
    int error = 0;
    const char *name = getenv("TERM");
    tcgetattr(STDIN_FILENO, &term.before);
    if (setupterm(NULL, STDOUT_FILENO, &error) == ERR)
        return err_set(e, SHD_ENOTSUP,
                       "TERM=%.40s: no such terminal is known here: try TERM=xterm, or `shardctl "
                       "status --watch`",
                       name != NULL ? name : "");
    catch_signals();
    if (capability("cup") != NULL && !open_full())
        return err_set(e, SHD_ENOTSUP, "cannot use the terminal: try `shardctl status --watch`");
    term.open = true;
    return SHD_OK;
}

void term_close(void)
{
    if (!term.open)
        return;
    term.open = false;
    if (!term.full)
        return;
    term.full = false;
    endwin();
    delscreen(term.screen);
    tcsetattr(STDIN_FILENO, TCSANOW, &term.before);
}

bool term_is_full_screen(void)
{
    return term.full;
}

void term_size(unsigned *ret_rows, unsigned *ret_cols)
{
    struct winsize w = { 0 };
    *ret_rows = 24;
    *ret_cols = 80;
    if (term.full) {
        *ret_rows = (unsigned)LINES;
        *ret_cols = (unsigned)COLS;
    } else if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_row > 0 && w.ws_col > 0) {
        *ret_rows = w.ws_row;
        *ret_cols = w.ws_col;
    }
    if (!term.full && *ret_rows > 4)
        *ret_rows -=
            2; /* a blank line follows each frame, and the cursor: all of it stays in view */
}

/* -- Showing --------------------------------------------------------------------------------- */

/* Each look can be told without colour. */
static attr_t attributes(enum screen_look look)
{
    static const attr_t looks[] = {
        [LOOK_PLAIN] = A_NORMAL, [LOOK_HEAD] = A_REVERSE, [LOOK_FAINT] = A_DIM,
        [LOOK_GOOD] = A_NORMAL,  [LOOK_WARN] = A_BOLD,    [LOOK_BAD] = A_BOLD | A_STANDOUT,
        [LOOK_MARK] = A_BOLD,
    };
    return looks[look];
}

static short pair_of(enum screen_look look)
{
    const bool coloured = look == LOOK_GOOD || look == LOOK_WARN || look == LOOK_BAD;
    return coloured && COLOR_PAIRS > LOOK_BAD ? (short)look : 0;
}

/* The lower right corner stays blank: writing it would scroll some terminals. */
static void show_row(const struct screen *s, unsigned row)
{
    const struct screen_cell *cells = &s->cells[(size_t)row * s->cols];
    const unsigned cols = row + 1 == s->rows ? s->cols - 1 : s->cols;
    move((int)row, 0);
    for (unsigned col = 0; col < cols; col++) {
        if (cells[col].c == 0)
            continue;
        cchar_t c;
        const wchar_t text[2] = { cells[col].c, L'\0' };
        if (setcchar(&c, text, attributes(cells[col].look), pair_of(cells[col].look), NULL) == OK)
            add_wch(&c);
    }
    clrtoeol();
}

void term_show(const struct screen *s)
{
    if (!term.full) {
        screen_print(s, stdout);
        putchar('\n');
        fflush(stdout);
        return;
    }
    for (unsigned row = 0; row < s->rows && row < (unsigned)LINES; row++)
        show_row(s, row);
    refresh();
}

/* -- Keys ------------------------------------------------------------------------------------ */

static enum term_key meaning(int c)
{
    static const struct {
        int c;
        enum term_key key;
    } keys[] = {
        { 'q', KEY_IS_QUIT },          { 'Q', KEY_IS_QUIT },
        { KEY_UP, KEY_IS_UP },         { 'k', KEY_IS_UP },
        { KEY_DOWN, KEY_IS_DOWN },     { 'j', KEY_IS_DOWN },
        { KEY_PPAGE, KEY_IS_PAGE_UP }, { KEY_NPAGE, KEY_IS_PAGE_DOWN },
        { ' ', KEY_IS_PAGE_DOWN },     { KEY_HOME, KEY_IS_FIRST },
        { KEY_END, KEY_IS_LAST },      { '\t', KEY_IS_TAB },
        { 's', KEY_IS_SORT },          { 'p', KEY_IS_PAUSE },
        { 'h', KEY_IS_HELP },          { '?', KEY_IS_HELP },
    };
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        if (keys[i].c == c)
            return keys[i].key;
    return c == KEY_RESIZE ? KEY_IS_REDRAW : KEY_IS_OTHER;
}

enum term_key term_key(void)
{
    if (term.full) {
        const int c = getch();
        return c == ERR ? KEY_IS_NONE : meaning(c);
    }
    struct pollfd p = { .fd = STDIN_FILENO, .events = POLLIN };
    char c;
    if (poll(&p, 1, 0) <= 0 || read(STDIN_FILENO, &c, 1) != 1)
        return KEY_IS_NONE;
    return c == '\n' ? KEY_IS_REDRAW : meaning(c);
}
