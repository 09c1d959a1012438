/* The compiled passes of kerasdist/collectives/fused_buffer.py, which has the same in numpy.

   out = copy = values * scale + other, each of the three left out if it isn't asked for,
   is one pass over memory. numpy needs up to three, which read what the one before has
   written.

   "stream": results are stored past the caches. A usual store reads the line of 64 bytes
   first, so that a copy moves three bytes for each one; and what is written here is read
   next by another core, or by TensorFlow after all else. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#ifdef __SSE2__ /* every x86-64 */
#include <emmintrin.h>
#define STREAMS 1
#else
#define STREAMS 0
#endif

#define LINE 64
/* Below this much, in bytes, the lock of the interpreter is kept. */
#define LEAST_WITHOUT_LOCK 16384

#define ONE(i) \
    do { \
        value = values[i]; \
        if (scaled) value = value * scale; \
        if (added) value = value + other[i]; \
        out[i] = value; \
        if (twice) copy[i] = value; \
    } while (0)

/* `scaled`, `added` and `twice` are constants where this is called, so that the loops
   have no branches. `out` may be the memory of `values` or `other`, from its first element on:
   no element depends on another one. */
#define DEFINE_PASS(name, type, vector, load, store, multiply, add, fill) \
    static inline void name( \
        type *out, const type *values, int scaled, type scale, int added, \
        const type *other, int twice, type *copy, Py_ssize_t count, int stream) \
    { \
        Py_ssize_t i = 0; \
        type value; \
        STREAMED(type, vector, load, store, multiply, add, fill) \
        _Pragma("GCC ivdep") for (; i < count; i++) ONE(i); \
    }

#if STREAMS
#define STREAMED(type, vector, load, store, multiply, add, fill) \
    /* Both have to begin at the same place of a line. */ \
    if (stream && !(twice && ((uintptr_t)out ^ (uintptr_t)copy) % sizeof(vector))) { \
        const Py_ssize_t lanes = sizeof(vector) / sizeof(type); \
        const vector scales = fill(scale); \
        vector four; \
        for (; i < count && (uintptr_t)(out + i) % LINE; i++) ONE(i); \
        for (; i + 4 * lanes <= count; i += 4 * lanes) \
            for (Py_ssize_t j = i; j < i + 4 * lanes; j += lanes) { \
                four = load(values + j); \
                if (scaled) four = multiply(four, scales); \
                if (added) four = add(four, load(other + j)); \
                store(out + j, four); \
                if (twice) store(copy + j, four); \
            } \
        _mm_sfence(); /* before the message that tells the others */ \
    }
#else
#define STREAMED(type, vector, load, store, multiply, add, fill) (void)stream;
#endif

DEFINE_PASS(
    pass_float, float, __m128, _mm_loadu_ps, _mm_stream_ps, _mm_mul_ps, _mm_add_ps,
    _mm_set1_ps)
DEFINE_PASS(
    pass_double, double, __m128d, _mm_loadu_pd, _mm_stream_pd, _mm_mul_pd, _mm_add_pd,
    _mm_set1_pd)

/* Calls a pass with constants: all of the branches are decided here. */
#define WITH(name, type, scaled, added, twice) \
    name( \
        buffers[0].buf, buffers[1].buf, scaled, (type)scale, added, buffers[2].buf, \
        twice, buffers[3].buf, buffers[0].len / (Py_ssize_t)sizeof(type), stream)
#define CALL(name, type) \
    switch (4 * scaled + 2 * given[2] + given[3]) { \
    case 0: WITH(name, type, 0, 0, 0); break; \
    case 1: WITH(name, type, 0, 0, 1); break; \
    case 2: WITH(name, type, 0, 1, 0); break; \
    case 3: WITH(name, type, 0, 1, 1); break; \
    case 4: WITH(name, type, 1, 0, 0); break; \
    case 5: WITH(name, type, 1, 0, 1); break; \
    case 6: WITH(name, type, 1, 1, 0); break; \
    default: WITH(name, type, 1, 1, 1); \
    }

static PyObject *combine(PyObject *module, PyObject *arguments)
{
    /* out, values, other, copy */
    PyObject *objects[4], *factor, *result = NULL;
    Py_buffer buffers[4] = {{0}};
    int stream, scaled, given[4];
    double scale = 0;
    char kind = 0;

    (void)module;
    if (!PyArg_ParseTuple(
            arguments, "OOOOOp", &objects[0], &objects[1], &factor, &objects[2],
            &objects[3], &stream))
        return NULL;
    scaled = factor != Py_None;
    if (scaled) {
        scale = PyFloat_AsDouble(factor);
        if (PyErr_Occurred()) return NULL;
    }
    for (int i = 0; i < 4; i++) {
        const int writable = i == 0 || i == 3 ? PyBUF_WRITABLE : 0;
        given[i] = objects[i] != Py_None;
        if (!given[i]) continue;
        if (PyObject_GetBuffer(
                objects[i], &buffers[i], PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | writable)
            < 0)
            goto end;
        if (i == 0) kind = buffers[0].format[0];
        if ((kind != 'f' && kind != 'd') || buffers[i].format[0] != kind
            || buffers[i].format[1] || buffers[i].len != buffers[0].len) {
            PyErr_Format(
                PyExc_ValueError,
                "The arrays must have one size, and one of the dtypes float32 and "
                "float64. Received: %zd bytes of format '%s', beside %zd of '%s'. Give "
                "others to numpy.",
                buffers[i].len, buffers[i].format, buffers[0].len, buffers[0].format);
            goto end;
        }
    }
    PyThreadState *state =
        buffers[0].len < LEAST_WITHOUT_LOCK ? NULL : PyEval_SaveThread();
    if (kind == 'f') CALL(pass_float, float)
    else CALL(pass_double, double)
    if (state) PyEval_RestoreThread(state);
    result = Py_NewRef(Py_None);
end:
    for (int i = 0; i < 4; i++)
        if (buffers[i].obj) PyBuffer_Release(&buffers[i]);
    return result;
}

static PyMethodDef methods[] = {
    {"combine", combine, METH_VARARGS,
     "combine(out, values, scale, other, copy, stream): see kerasdist.collectives.fused_buffer.combine_arrays."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
