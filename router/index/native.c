/* Presumed blocks by runs of them, in an eighth of the time that runs.py takes and a quarter of its memory.

   runs.py tells what is kept, and why; here it is the same, step by step, and tested to be. Runs are structs in a list,
   oldest first, instead of objects in a dict; maps from keys to runs are tables of two arrays. Nothing here is an object
   of Python's, so the garbage collector has nothing to look at.

   Where there is no memory, MemoryError is raised, and what was to be recorded may be held in part. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { OPEN, ENDED, SHARED, UNNAMED };

#define MOST_RUNS 32
#define LEAST_SLOTS 8

typedef struct run {
    uint64_t *keys; /* NULL where they have no name */
    Py_ssize_t start, size, turn;
    struct run *older, *newer;
    char state, placed;
} Run;

/* -- maps ------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t *keys;
    Run **runs; /* NULL: a free slot */
    size_t slots, used;
} Map;

static size_t
first_slot(const Map *map, uint64_t key)
{
    /* Keys are digests, but nothing here is to be slow where they are not. */
    return (size_t)(key * 0x9E3779B97F4A7C15u >> 32) & (map->slots - 1);
}

/* Where the key is, or would be put. There is a free slot. */
static size_t
slot_of(const Map *map, uint64_t key)
{
    size_t slot = first_slot(map, key);
    while (map->runs[slot] != NULL && map->keys[slot] != key)
        slot = (slot + 1) & (map->slots - 1);
    return slot;
}

static Run *
map_get(const Map *map, uint64_t key)
{
    return map->slots ? map->runs[slot_of(map, key)] : NULL;
}

static void
map_clear(Map *map)
{
    PyMem_Free(map->keys);
    PyMem_Free(map->runs);
    memset(map, 0, sizeof *map);
}

/* Room for one more. Here and below, -1 or NULL: there is no memory. */
static int
map_reserve(Map *map)
{
    if (map->slots && map->used + 1 <= map->slots / 3 * 2)
        return 0;
    Map wider = {NULL, NULL, map->slots ? 2 * map->slots : LEAST_SLOTS, map->used};
    wider.keys = PyMem_New(uint64_t, wider.slots);
    wider.runs = PyMem_Calloc(wider.slots, sizeof *wider.runs);
    if (wider.keys == NULL || wider.runs == NULL) {
        map_clear(&wider);
        return -1;
    }
    for (size_t i = 0; i < map->slots; i++)
        if (map->runs[i] != NULL) {
            size_t slot = slot_of(&wider, map->keys[i]);
            wider.keys[slot] = map->keys[i];
            wider.runs[slot] = map->runs[i];
        }
    map_clear(map);
    *map = wider;
    return 0;
}

/* What leads to a run already is led to another without any memory, and so without fail. */
static int
map_set(Map *map, uint64_t key, Run *run)
{
    if (map_get(map, key) == NULL) {
        if (map_reserve(map) < 0)
            return -1;
        map->used++;
    }
    size_t slot = slot_of(map, key);
    map->keys[slot] = key;
    map->runs[slot] = run;
    return 0;
}

/* Take the key out if it leads to this run. Those behind it move up, so that no slot is left that only stands for
   something gone. */
static void
map_drop(Map *map, uint64_t key, const Run *run)
{
    if (!map->slots)
        return;
    size_t last = map->slots - 1, gap = slot_of(map, key);
    if (map->runs[gap] == NULL || map->runs[gap] != run)
        return;
    for (size_t slot = (gap + 1) & last; map->runs[slot] != NULL; slot = (slot + 1) & last) {
        size_t first = first_slot(map, map->keys[slot]);
        if (((slot - first) & last) >= ((slot - gap) & last)) {
            map->keys[gap] = map->keys[slot];
            map->runs[gap] = map->runs[slot];
            gap = slot;
        }
    }
    map->runs[gap] = NULL;
    map->used--;
}

/* -- runs ------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Map heads, open, where;
    int finds; /* blocks are found in `where`, too */
    Run *oldest, *newest;
    Py_ssize_t named, unnamed, most;
} Runs;

static void
unlink_run(Runs *self, Run *run)
{
    *(run->older != NULL ? &run->older->newer : &self->oldest) = run->newer;
    *(run->newer != NULL ? &run->newer->older : &self->newest) = run->older;
    run->older = run->newer = NULL;
    run->placed = 0;
}

static void
touch(Runs *self, Run *run)
{
    run->older = self->newest;
    run->newer = NULL;
    *(self->newest != NULL ? &self->newest->newer : &self->oldest) = run;
    self->newest = run;
    run->placed = 1;
}

static void
free_run(Run *run)
{
    PyMem_Free(run->keys);
    PyMem_Free(run);
}

/* A run in no order yet. `keys`: NULL where they have no name; they are copied. */
static Run *
new_run(Py_ssize_t start, const uint64_t *keys, Py_ssize_t size)
{
    Run *run = PyMem_Calloc(1, sizeof *run);
    if (run == NULL)
        return NULL;
    run->start = start;
    run->size = size;
    run->state = keys != NULL ? SHARED : UNNAMED;
    if (keys != NULL) {
        if ((run->keys = PyMem_New(uint64_t, size)) == NULL) {
            PyMem_Free(run);
            return NULL;
        }
        memcpy(run->keys, keys, (size_t)size * sizeof *keys);
    }
    return run;
}

/* The same, found by its first block. */
static Run *
new_head(Runs *self, Py_ssize_t start, const uint64_t *keys, Py_ssize_t size)
{
    Run *run = new_run(start, keys, size);
    if (run != NULL && map_set(&self->heads, keys[0], run) < 0) {
        free_run(run);
        return NULL;
    }
    return run;
}

static int
extend(Run *run, const uint64_t *keys, Py_ssize_t size)
{
    uint64_t *longer = run->keys;
    if (PyMem_Resize(longer, uint64_t, run->size + size) == NULL)
        return -1;
    run->keys = longer;
    memcpy(run->keys + run->size, keys, (size_t)size * sizeof *keys);
    run->size += size;
    return 0;
}

/* The first `size` stay. */
static void
shorten(Run *run, Py_ssize_t size)
{
    run->size = size;
    if (run->keys != NULL && size) {
        uint64_t *shorter = run->keys;
        if (PyMem_Resize(shorter, uint64_t, size) != NULL)
            run->keys = shorter;
    }
}

static int
state_at(const Run *run, Py_ssize_t place)
{
    return run->state == SHARED || place - run->start >= run->turn ? run->state : SHARED;
}

/* gallop.py `common`: of a run, and of keys of which the first one is its first one. */
static Py_ssize_t
common(const Run *run, const uint64_t *keys, Py_ssize_t count)
{
    Py_ssize_t most = Py_MIN(run->size, count);
    if (run->keys[most - 1] == keys[most - 1])
        return most;
    Py_ssize_t low = 0, high = most - 1;
    while (low < high) {
        Py_ssize_t middle = (low + high + 1) / 2;
        if (run->keys[middle - 1] == keys[middle - 1])
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static void
close_run(Runs *self, Run *run)
{
    if (run->state == OPEN)
        map_drop(&self->open, run->keys[run->size - 1], run);
}

/* Those that were found before are found in this run in any case. */
static int
find_in(Runs *self, Run *run, const uint64_t *keys, Py_ssize_t count)
{
    int failed = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        failed |= map_set(&self->where, keys[i], run) < 0;
    return failed ? -1 : 0;
}

/* The first `count` blocks stay. Without any, the run is freed. */
static void
trim(Runs *self, Run *run, Py_ssize_t count)
{
    *(run->state == UNNAMED ? &self->unnamed : &self->named) -= run->size - count;
    if (run->state != UNNAMED) {
        close_run(self, run);
        if (!count)
            map_drop(&self->heads, run->keys[0], run);
        if (self->finds)
            for (Py_ssize_t i = count; i < run->size; i++)
                map_drop(&self->where, run->keys[i], run);
    }
    if (count) {
        shorten(run, count);
        return;
    }
    if (run->placed)
        unlink_run(self, run);
    free_run(run);
}

static void
lose(Runs *self, const uint64_t *keys, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        Run *run = map_get(&self->where, keys[i]);
        if (run == NULL || !run->placed)
            continue;
        Py_ssize_t place = run->size;
        while (place-- > 0)
            if (run->keys[place] == keys[i]) {
                trim(self, run, place);
                break;
            }
    }
}

static void
evict(Runs *self, Py_ssize_t room)
{
    Py_ssize_t surplus;
    while ((surplus = self->named + self->unnamed - room) > 0 && self->oldest != NULL)
        trim(self, self->oldest, Py_MAX(0, self->oldest->size - surplus));
}

/* The first `count` blocks are a run of their own from now on, in no order. The others keep its place. */
static int
part(Runs *self, Run *run, Py_ssize_t count)
{
    uint64_t last = run->keys[run->size - 1];
    Run *rest = new_head(self, run->start + count, run->keys + count, run->size - count);
    if (rest == NULL)
        return -1;
    rest->state = run->state;
    rest->turn = Py_MAX(0, run->turn - count);
    rest->older = run->older;
    rest->newer = run->newer;
    *(run->older != NULL ? &run->older->newer : &self->oldest) = rest;
    *(run->newer != NULL ? &run->newer->older : &self->newest) = rest;
    rest->placed = 1;
    run->older = run->newer = NULL;
    run->placed = 0;
    if (map_get(&self->open, last) == run)
        (void)map_set(&self->open, last, rest);
    if (self->finds)
        (void)find_in(self, rest, rest->keys, rest->size);
    shorten(run, count);
    return 0;
}

typedef struct {
    Run **runs, *few[8];
    Py_ssize_t count, room;
} Path;

static int
path_add(Path *path, Run *run)
{
    if (path->count == path->room) {
        Run **more = path->runs == path->few ? NULL : path->runs;
        if (PyMem_Resize(more, Run *, 2 * path->room) == NULL)
            return -1;
        if (path->runs == path->few)
            memcpy(more, path->few, sizeof path->few);
        path->runs = more;
        path->room *= 2;
    }
    path->runs[path->count++] = run;
    return 0;
}

/* The runs of those leading blocks that are held, taken out of the order. */
static int
find_path(Runs *self, const uint64_t *keys, Py_ssize_t count, Path *path)
{
    for (Py_ssize_t at = 0; at < count;) {
        Run *run = map_get(&self->heads, keys[at]);
        if (run == NULL || run->start != at)
            break;
        Py_ssize_t there = common(run, keys + at, count - at);
        if (there < run->size) {
            if (part(self, run, there) < 0)
                return -1;
        } else
            unlink_run(self, run);
        if (path_add(path, run) < 0) {
            touch(self, run);
            return -1;
        }
        at += there;
    }
    return 0;
}

/* One run in place of these, which go on one another. */
static int
join(Runs *self, Path *path)
{
    Run *first = path->runs[0];
    while (path->count > 1) {
        Run *run = path->runs[1];
        if (extend(first, run->keys, run->size) < 0)
            return -1;
        if (self->finds)
            (void)find_in(self, first, run->keys, run->size);
        map_drop(&self->heads, run->keys[0], run);
        free_run(run);
        memmove(path->runs + 1, path->runs + 2, (size_t)(--path->count - 1) * sizeof *path->runs);
    }
    return 0;
}

/* What is new: behind the path, or as a part of its last run. */
static int
grow(Runs *self, Path *path, Py_ssize_t start, const uint64_t *keys, Py_ssize_t count, int before)
{
    if (before == SHARED) {
        Run *run = new_head(self, start, keys, count);
        if (run == NULL)
            return -1;
        if (path_add(path, run) < 0) {
            map_drop(&self->heads, keys[0], run);
            free_run(run);
            return -1;
        }
    } else if (extend(path->runs[path->count - 1], keys, count) < 0)
        return -1;
    self->named += count;
    if (!self->finds)
        return 0;
    lose(self, keys, count);
    return find_in(self, path->runs[path->count - 1], keys, count);
}

static int
record(Runs *self, const uint64_t *keys, Py_ssize_t count, int ended)
{
    Path path = {path.few, {NULL}, 0, Py_ARRAY_LENGTH(path.few)};
    Py_ssize_t there = 0;
    int before = SHARED, failed = find_path(self, keys, count, &path) < 0;

    if (path.count) {
        Run *last = path.runs[path.count - 1];
        there = last->start + last->size;
        before = state_at(last, there - 1);
    }
    for (Py_ssize_t i = 0; i < path.count; i++) {
        close_run(self, path.runs[i]);
        path.runs[i]->state = SHARED;
    }
    failed = failed || (path.count > self->most && join(self, &path) < 0);
    failed = failed || (there < count && grow(self, &path, there, keys + there, count - there, before) < 0);
    for (Py_ssize_t i = path.count; i-- > 0;)
        touch(self, path.runs[i]);
    if (!failed) {
        Run *last = path.runs[path.count - 1];
        if (there < count) {
            last->turn = (ended ? there - (before == OPEN) : count - 1) - last->start;
            last->state = ended ? ENDED : OPEN;
            failed = !ended && map_set(&self->open, keys[count - 1], last) < 0;
        } else if (before == (ended ? OPEN : ENDED)) {
            last->state = ENDED;
            last->turn = count - 1 - last->start;
        }
    }
    if (path.runs != path.few)
        PyMem_Free(path.runs);
    return failed ? -1 : 0;
}

static void
clear(Runs *self)
{
    for (Run *run = self->oldest, *newer; run != NULL; run = newer) {
        newer = run->newer;
        free_run(run);
    }
    map_clear(&self->heads);
    map_clear(&self->open);
    map_clear(&self->where);
    self->oldest = self->newest = NULL;
    self->named = self->unnamed = 0;
    self->finds = 0;
}

/* -- for Python ------------------------------------------------------------------------------------------------- */

static int
take_keys(PyObject *from, Py_buffer *keys)
{
    if (PyObject_GetBuffer(from, keys, PyBUF_FORMAT | PyBUF_ND) < 0)
        return -1;
    if (keys->itemsize == sizeof(uint64_t) && keys->ndim == 1 && keys->format != NULL && !strcmp(keys->format, "Q"))
        return 0;
    PyBuffer_Release(keys);
    PyErr_SetString(PyExc_TypeError, "expected a buffer of unsigned 64-bit integers");
    return -1;
}

static Py_ssize_t
count_of(const Py_buffer *keys)
{
    return keys->len / (Py_ssize_t)sizeof(uint64_t);
}

static int
expect(Py_ssize_t got, Py_ssize_t wanted)
{
    if (got == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, got);
    return -1;
}

static PyObject *
runs_match(Runs *self, PyObject *given)
{
    Py_buffer view;
    if (take_keys(given, &view) < 0)
        return NULL;
    const uint64_t *keys = view.buf;
    Py_ssize_t at = 0, count = count_of(&view);
    int ends = 0;
    while (at < count) {
        const Run *run = map_get(&self->heads, keys[at]);
        if (run == NULL || run->start != at)
            break;
        at += common(run, keys + at, count - at);
        ends = state_at(run, at - 1) == ENDED;
    }
    PyBuffer_Release(&view);
    PyObject *found = PyTuple_New(2), *depth = PyLong_FromSsize_t(at);
    if (found == NULL || depth == NULL) {
        Py_XDECREF(found);
        Py_XDECREF(depth);
        return NULL;
    }
    PyTuple_SET_ITEM(found, 0, depth);
    PyTuple_SET_ITEM(found, 1, PyBool_FromLong(ends));
    return found;
}

static PyObject *
runs_record(Runs *self, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer view;
    Py_ssize_t room, beyond;
    int ended;

    if (expect(given, 4) < 0 || ((room = PyLong_AsSsize_t(args[1])) == -1 && PyErr_Occurred()) ||
        (ended = PyObject_IsTrue(args[2])) < 0 || ((beyond = PyLong_AsSsize_t(args[3])) == -1 && PyErr_Occurred()))
        return NULL;
    if (room < 1) {
        PyErr_SetString(PyExc_ValueError, "expected room for at least one block");
        return NULL;
    }
    if (take_keys(args[0], &view) < 0)
        return NULL;
    Py_ssize_t count = Py_MIN(count_of(&view), room), unnamed = Py_MIN(beyond, room - count);
    int failed = 0;
    if (unnamed > 0) {
        Run *run = new_run(0, NULL, unnamed);
        if ((failed = run == NULL) == 0) {
            self->unnamed += unnamed;
            touch(self, run);
        }
    }
    failed = failed || (count && record(self, view.buf, count, ended) < 0);
    PyBuffer_Release(&view);
    evict(self, room);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *
runs_add(Runs *self, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer view;
    Py_ssize_t start;

    if (expect(given, 2) < 0 || ((start = PyLong_AsSsize_t(args[0])) == -1 && PyErr_Occurred()) ||
        take_keys(args[1], &view) < 0)
        return NULL;
    Py_ssize_t count = count_of(&view);
    Run *run = count ? new_head(self, start, view.buf, count) : NULL;
    PyBuffer_Release(&view);
    if (!count) {
        PyErr_SetString(PyExc_ValueError, "expected at least one key");
        return NULL;
    }
    if (run == NULL)
        return PyErr_NoMemory();
    self->named += count;
    touch(self, run);
    if (self->finds && find_in(self, run, run->keys, run->size) < 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *
runs_forget(Runs *self, PyObject *given)
{
    Py_buffer view;
    if (take_keys(given, &view) < 0)
        return NULL;
    Py_ssize_t count = count_of(&view);
    Run *run = count ? map_get(&self->open, ((const uint64_t *)view.buf)[count - 1]) : NULL;
    PyBuffer_Release(&view);
    if (run != NULL) {
        Py_ssize_t stay = Py_MAX(0, run->size - count);
        trim(self, run, stay);
        if (stay)
            run->state = SHARED;
    }
    Py_RETURN_NONE;
}

static PyObject *
runs_drop(Runs *self, PyObject *given)
{
    Py_buffer view;
    if (take_keys(given, &view) < 0)
        return NULL;
    int failed = 0;
    if (!self->finds) {
        for (Run *run = self->oldest; run != NULL && !failed; run = run->newer)
            failed = run->state != UNNAMED && find_in(self, run, run->keys, run->size) < 0;
        if (failed)
            map_clear(&self->where);
        else
            self->finds = 1;
    }
    if (!failed)
        lose(self, view.buf, count_of(&view));
    PyBuffer_Release(&view);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *
runs_evict(Runs *self, PyObject *given)
{
    Py_ssize_t room = PyLong_AsSsize_t(given);
    if (room == -1 && PyErr_Occurred())
        return NULL;
    evict(self, room);
    Py_RETURN_NONE;
}

static PyObject *
runs_clear(Runs *self, PyObject *Py_UNUSED(none))
{
    clear(self);
    Py_RETURN_NONE;
}

static PyObject *
runs_runs(Runs *self, PyObject *Py_UNUSED(none))
{
    PyObject *all = PyList_New(0);
    for (Run *run = self->oldest; all != NULL && run != NULL; run = run->newer) {
        PyObject *keys = PyList_New(run->size), *told = NULL;
        for (Py_ssize_t i = 0; keys != NULL && i < run->size; i++) {
            PyObject *key = PyLong_FromUnsignedLongLong(run->keys != NULL ? run->keys[i] : 0);
            if (key == NULL)
                Py_CLEAR(keys);
            else
                PyList_SET_ITEM(keys, i, key);
        }
        if (keys != NULL)
            told = Py_BuildValue("nNin", run->start, keys, (int)run->state, run->turn);
        if (told == NULL || PyList_Append(all, told) < 0)
            Py_CLEAR(all);
        Py_XDECREF(told);
    }
    return all;
}

static Py_ssize_t
runs_length(Runs *self)
{
    return self->named + self->unnamed;
}

static PyObject *
runs_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    Py_ssize_t most = MOST_RUNS;
    if (named != NULL && PyDict_GET_SIZE(named)) {
        PyErr_SetString(PyExc_TypeError, "Runs() takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "|n:Runs", &most))
        return NULL;
    if (most < 1) {
        PyErr_SetString(PyExc_ValueError, "a path has at least one run");
        return NULL;
    }
    Runs *self = (Runs *)PyType_GenericAlloc(type, 0);
    if (self != NULL)
        self->most = most;
    return (PyObject *)self;
}

static void
runs_dealloc(Runs *self)
{
    PyTypeObject *type = Py_TYPE(self);
    clear(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"match", (PyCFunction)runs_match, METH_O, NULL},
    {"record", (PyCFunction)(void (*)(void))runs_record, METH_FASTCALL, NULL},
    {"add", (PyCFunction)(void (*)(void))runs_add, METH_FASTCALL, NULL},
    {"forget", (PyCFunction)runs_forget, METH_O, NULL},
    {"drop", (PyCFunction)runs_drop, METH_O, NULL},
    {"evict", (PyCFunction)runs_evict, METH_O, NULL},
    {"clear", (PyCFunction)runs_clear, METH_NOARGS, NULL},
    {"runs", (PyCFunction)runs_runs, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "What one replica holds; see router.index.runs."},
    {Py_tp_new, runs_new},
    {Py_tp_dealloc, runs_dealloc},
    {Py_tp_methods, methods},
    {Py_sq_length, runs_length},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "router.index.native.Runs",
    .basicsize = sizeof(Runs),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static int
fill(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot steps[] = {
    {Py_mod_exec, fill},
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "router.index.native",
    .m_doc = "Presumed blocks by runs of them.",
    .m_size = 0,
    .m_methods = NULL,
    .m_slots = steps,
};

PyMODINIT_FUNC
PyInit_native(void)
{
    return PyModuleDef_Init(&module);
}
